"""One training step, from a batch to updated weights: gradients, clipping, update and numbers.

A step must not change anything if its loss or its gradient norm is not finite. The device computes
this as a flag, so that no check of the inputs makes the host wait. There are two ways to use it:

- The host reads the flag, once per step, and updates the weights only if it is not set.
- If the optimizers read the flag themselves (`Task.defers`), the host does not wait at all. Where
  the flag is set, the weights, the moments, the moving average and the batch norm statistics keep
  their values. The host launches step t + 1, reads the results of step t, and then logs them or
  reports an error:

      host     launch t | read t - 1 | launch t + 1 | read t | launch t + 2 | …
      device        step t - 1       |        step t        |       step t + 1 …

  Before each checkpoint and evaluation, and at the end of the run, the host reads the results of
  the newest step.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from data.loading.batch import Batch
from heads import FactoredHead, LabelSets
from heads.collectives import all_gather_equal, all_reduce_sum
from heads.engine.agreement import non_finite_rows
from heads.engine.inputs import NOTHING_COUNTS
from heads.label_sets import concatenate_labels
from trainer.backbone.batch_norm import BufferCopies, follow_first_rank
from trainer.optimizers import set_rate
from trainer.task import Task, labels_of
from trainer.world import random_state, set_random_state

_POLL_SECONDS = 1e-4
# A learned scale outside this range means that its training has collapsed or diverged.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-3, 1e5


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Numbers:
    """The loss and gradient norm of a step, on the host.

    `skipped`: the step changed nothing, because the loss or the gradient norm is not finite.
    `reason` states why, and is empty for other steps. `overflowed`: the step was skipped because of
    the fp16 loss scale, which is now lower.
    """

    loss: float
    gradient_norm: float
    skipped: bool = False
    reason: str = ""
    overflowed: bool = False


class PartLoss(NamedTuple):
    """The loss of a micro-batch on the device, and the rows of its features that are not finite.

    `broken_rows` are the `non_finite_rows` of the `num_rows` rows passed to the head.
    """

    loss: Tensor
    num_rows: int
    broken_rows: Tensor


@dataclass(frozen=True)
class Gradients:
    """The loss of a step whose gradients have been added to the parameters.

    `loss` is the unscaled loss, a scalar on the device. `parts` contains the losses of the
    micro-batches, and `part_weights` contains the sums of their row weights over all ranks (None if
    every row has the weight 1, or if the rows have label sets: a batch may have no labels).
    """

    loss: Tensor
    parts: Sequence[PartLoss]
    part_weights: Tensor | None = None


class StepNumbers:
    """The numbers of a step, which are copied to the host without waiting.

    `skipped` is the flag on the device. `log_scale` is the learned scale of the logits, if there is
    one. `event` completes when the copy is complete; it is None if the tensors are on the CPU.
    """

    event: torch.cuda.Event | None = None

    def __init__(
        self,
        step: int,
        gradients: Gradients,
        norm: Tensor,
        *,
        loss_scale: Tensor | float = 1.0,
        log_scale: Tensor | None = None,
    ) -> None:
        self.step, self.parts = step, gradients.parts
        loss, weights = gradients.loss, gradients.part_weights
        is_finite = loss.isfinite() & norm.isfinite()
        self.skipped = ~is_finite
        weight = 1.0 if weights is None else weights.sum()
        learned = 0.0 if log_scale is None else log_scale.detach()
        numbers = [loss, norm, is_finite, weight, loss_scale, learned]
        packed = [torch.zeros_like(norm).add(each).reshape(1) for each in numbers]
        packed += [
            torch.cat([part.loss.double().reshape(1), part.broken_rows]) for part in self.parts
        ]
        self._host = torch.cat(packed)
        if norm.device.type == "cuda":
            on_device = self._host
            self._host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._host.copy_(on_device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self.event = copied

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for this step, but not for later ones.

        If a rank is lost, the collectives of the other ranks never end on their devices. While
        waiting, this calls `check` repeatedly, which must raise an error in that case.
        """
        while self.event is not None and not self.event.query():
            check()
            time.sleep(_POLL_SECONDS)

    @cached_property
    def values(self) -> list[float]:
        """The loss, the gradient norm, whether both are finite, the sum of all row weights of the
        global batch, the loss scale and the logarithm of the learned scale, followed by the loss
        and the `broken_rows` of each part. Call `wait` first."""
        values: list[float] = self._host.tolist()
        return values


# ---------------------------------------------------------------- a step


def take_step(
    task: Task,
    batch: Batch,
    rate_factor: float,
    *,
    step: int,
    check: Callable[[], None] = lambda: None,
) -> StepNumbers:
    """Take a step at `rate_factor` times the peak learning rates (collective).

    If the task defers, the step is only launched. Otherwise, see `StepNumbers.wait` for `check`.
    Call `read_numbers` for the result.
    """
    copies = BufferCopies(task.backbone)
    set_rates(task, rate_factor)
    scale, max_norm = task.loss_scale.value, task.recipe.train.clip_norm
    gradients = compute_gradients(task, batch, step=step)
    norm = gradient_norm(task)
    taken = StepNumbers(step, gradients, norm, loss_scale=scale, log_scale=task.head.log_scale)
    task.loss_scale.update(gradients.loss, taken.skipped)
    if task.defers:
        assert task.head_optimizer is not None
        excess = torch.ones_like(norm)
        if max_norm is not None:
            excess = excess.where(norm <= max_norm, (norm + 1e-6) / max_norm)
        # Class rows that are already updated cannot be divided. Then there is no loss scale.
        updates_early = task.recipe.optimizer.head.fused_sgd == "in_backward"
        divisor = None if updates_early else (scale * excess).float()
        copies.restore_where(taken.skipped)  # before the moving average reads the buffers
        with _flagged([task.strategy.optimizer, task.head_optimizer], divisor, taken.skipped):
            update_weights(task, step=step, skipped=taken.skipped)
        return taken
    taken.wait(check)
    _, known_norm, is_finite, _, known_scale, *_ = taken.values
    if not is_finite:
        task.zero_gradients()
        copies.restore()
        return taken
    divide_gradients(task, known_scale, known_norm, max_norm)
    update_weights(task, step=step)
    return taken


@contextmanager
def _flagged(
    optimizers: Sequence[Optimizer], divisor: Tensor | None, skipped: Tensor
) -> Iterator[None]:
    """Inside the context, steps of `optimizers` divide the gradients by `divisor` and change
    nothing if `skipped` is true."""
    flags = {"found_inf": skipped.to(torch.float32)}
    if divisor is not None:
        flags["grad_scale"] = divisor
    for optimizer in optimizers:
        for name, flag in flags.items():
            setattr(optimizer, name, flag)
    try:
        yield
    finally:
        for optimizer in optimizers:
            for name in flags:
                delattr(optimizer, name)


def read_numbers(
    task: Task,
    taken: StepNumbers,
    *,
    explains: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Numbers:
    """Return the numbers of a step. Waits for the device if the step was deferred; see
    `StepNumbers.wait` for `check`.

    If `explains` is true, the reason for a NaN loss names the ranks and rows (collective). Raises
    on every rank ValueError if no row of the global batch has a positive weight, and
    FloatingPointError if a learned scale has left its range or if the step must be skipped but the
    backward pass already updated class rows: they are updated if the loss is finite, before the
    gradients of the backbone are known.
    """
    taken.wait(check)
    loss, norm, is_finite, weight, loss_scale, log_scale, *of_parts = taken.values
    if not math.log(_SMALLEST_SCALE) <= log_scale <= math.log(_LARGEST_SCALE):
        raise FloatingPointError(
            f"the learned scale of the logits is e^{log_scale:.1f}, outside {_SMALLEST_SCALE:g} to "
            f"{_LARGEST_SCALE:g}: lower optimizer.head.lr, or set head.logits.learn_scale=false"
        )
    if is_finite:
        return Numbers(loss, norm)
    if not weight:
        raise ValueError(f"step {taken.step}: {NOTHING_COUNTS}")
    reason = f"the loss is {loss} and the gradient norm is {norm}"
    size = len(of_parts) // len(taken.parts)
    for index, part in enumerate(taken.parts if explains else ()):
        of_part, *broken = of_parts[index * size : (index + 1) * size]
        if math.isnan(of_part):
            rows = torch.tensor(broken, dtype=torch.int64, device=task.world.device)
            error = task.head.nan_error(part.num_rows, rows)
            reason = str(error).rpartition(": ")[0]  # its suggestion does not name recipe keys
            if len(taken.parts) > 1:
                reason = f"micro-batch {index + 1} of {len(taken.parts)}: {reason}"
            break
    if task.recipe.optimizer.head.fused_sgd == "in_backward" and math.isfinite(loss):
        raise FloatingPointError(
            f"{reason}, but the class rows were already updated, so the step cannot be skipped: "
            "lower optimizer.lr or optimizer.head.lr, or set optimizer.head.fused_sgd=deferred"
        )
    return Numbers(loss, norm, True, reason, task.loss_scale.overflows(loss, loss_scale))


# ---------------------------------------------------------------- gradients


def compute_gradients(task: Task, batch: Batch, *, step: int) -> Gradients:
    """Compute the gradients of the mean loss over the global batch, multiplied by the loss scale
    (collective). `batch` contains this rank's rows.

    If the loss is a mean over rows, the gradients of the micro-batches are added up. If it couples
    the rows of the batch, or if the backward pass updates class rows, the head processes the whole
    global batch at once (gradient caching).

    Raises ValueError on every rank if a label of the first batch of a task is outside the classes.
    The labels of later batches are not checked, because opening a split checks its labels, and a
    stream skips samples whose label is not a class.
    """
    # A function of the step, so that a resumed run repeats the same draws. Each call of the head
    # adds 1.
    head, calls_once = task.head, task.recipe.calls_head_once
    head.draw = step if calls_once else step * task.micro_batches
    parts = _Parts(task, split_batch(batch.to(task.world.device), task.micro_batches))
    if not task.has_checked_inputs and parts.num_labels:
        # These checks make the host wait. They also compare the label trees of the ranks.
        labels, weights = targets(parts.batches)
        features = torch.empty(len(labels), head.dim, device=task.world.device)
        head.check(features, labels, weights)
        task.has_checked_inputs = True
    caches = len(parts.batches) > 1 and calls_once
    loss = parts.backward_with_cached_gradients() if caches else parts.backward_one_by_one()
    if task.recipe.backbone.batch_norm == "local":
        follow_first_rank(task.backbone, task.world.group)
    return Gradients(loss, parts.losses, None if parts.have_sets else parts.weights)


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch into `num_parts` batches of consecutive rows, some of which may be empty.

    If the rows have label sets, more than one part makes the host wait for the device, because the
    offsets are read.
    """
    if num_parts == 1:
        return [batch]
    ends = [batch.num_rows * part // num_parts for part in range(num_parts + 1)]
    return [batch.rows(*pair) for pair in pairwise(ends)]


def targets(parts: Sequence[Batch]) -> tuple[Tensor | LabelSets, Tensor | None]:
    """Return the labels of `parts` and the weights of their rows. The weights are None if there are
    no mixed rows.

    With mixed rows, the labels [2 b], or label sets of 2 b rows, are the first classes of all rows
    followed by their second classes. The loss of a mixed row is then the weighted mean of the
    losses for its two classes. With `batch_ce`, the loss is larger by log 2, because the partition
    sum contains every row twice.
    """
    labels = [labels_of(part) for part in parts]
    second = [part.mixed for part in parts if part.mixed is not None]
    if not second:
        return concatenate_labels(labels), None
    shares = torch.cat([mixed.weights for mixed in second])
    labels += [labels_of(mixed) for mixed in second]
    return concatenate_labels(labels), torch.cat([shares, 1 - shares])


@dataclass(frozen=True)
class _Parts:
    """The micro-batches of a step, and the losses computed so far."""

    task: Task
    batches: list[Batch]
    losses: list[PartLoss] = field(default_factory=list)

    @cached_property
    def weights(self) -> Tensor | None:
        """The row weights of each part, summed over all ranks; None if every row has the weight 1
        (collective)."""
        head = self.task.head
        if head.has_uniform_rows and not self.have_sets:
            return None
        sums = [head.row_weights(*targets([batch])).sum() for batch in self.batches]
        return all_reduce_sum(torch.stack(sums), self.task.world.group)

    @property
    def have_sets(self) -> bool:
        return self.batches[0].offsets is not None

    @cached_property
    def _labels_of_ranks(self) -> list[list[int]]:
        """The number of labels of each rank in each part (collective).

        It depends on the samples, and only this rank knows which of its own were replaced. The
        exchange uses CPU tensors and gloo, so it does not wait for the device.
        """
        num_labels = []
        for batch in self.batches:
            second = 0 if batch.mixed is None else len(batch.mixed.labels)
            num_labels.append(len(batch.labels) + second)
        of_ranks = all_gather_equal(torch.tensor(num_labels), self.task.world.group)
        return [each.tolist() for each in of_ranks]

    @property
    def num_labels(self) -> int:
        """The number of labels of the global batch (collective)."""
        return sum(map(sum, self._labels_of_ranks)) if self.have_sets else self.task.global_batch

    def shares(self) -> Sequence[Tensor | float]:
        """Return the fraction of the global batch's row weights in each part (collective).

        If no row has a positive weight, the shares are NaN, so that the step is skipped. With label
        sets, they are 0, and so is the loss: a batch may have no labels.
        """
        if self.weights is not None:
            total = self.weights.sum()
            if self.have_sets:
                total = total.where(total > 0, 1)
            return (self.weights / total).unbind()
        parts = range(len(self.batches))
        sizes = [sum(self._rows_of_ranks(slice(part, part + 1))) for part in parts]
        return [size / self.task.global_batch for size in sizes]

    def backward_one_by_one(self) -> Tensor:
        """Compute the gradients for a loss that is a mean over rows: weight each part by its share
        of the row weights.
        """
        task, shares = self.task, self.shares()
        task.head.accumulates = len(self.batches) > 1
        total = torch.zeros((), device=task.world.device)
        for index, batch in enumerate(self.batches):
            features = self._forward(batch, last=index == len(self.batches) - 1)
            loss, gradient = self._loss(features, slice(index, index + 1), shares[index])
            total += loss
            self._backward(features, gradient)
        with task.phases("head"):
            task.head.reduce_gradients()
        return total

    def backward_with_cached_gradients(self) -> Tensor:
        """Compute the gradients if the head must process the whole global batch at once.

        Gradient caching (Gao et al. 2021): compute the features of all parts without a graph, run
        the head once, then run the backbone's forward and backward passes part by part with the
        gradients of the features. By the chain rule, the gradient of each weight is the sum of its
        gradients over the parts, so the result is the same as for one large batch. Gradient caching
        requires only the memory for one part and the features, at the cost of a second forward
        pass.
        """
        task, device = self.task, self.task.world.device
        states, outputs = [], []
        with torch.no_grad():
            for batch in self.batches:
                states.append(random_state(device))
                outputs.append(self._forward(batch, last=False))
        after = random_state(device)
        task.head.accumulates = False
        loss, gradient = self._loss(torch.cat(outputs), slice(0, len(self.batches)), 1.0)
        # The cached gradients are correct only for the features of the first pass. The second pass
        # therefore draws the same random numbers (dropout), and it must not update the batch norm
        # statistics again.
        buffers = BufferCopies(task.backbone)
        gradients = gradient.split([batch.num_rows for batch in self.batches])
        for index, (batch, state, grad) in enumerate(
            zip(self.batches, states, gradients, strict=True)
        ):
            set_random_state(state, device)
            self._backward(self._forward(batch, last=index == len(self.batches) - 1), grad)
        set_random_state(after, device)
        buffers.restore()
        return loss

    def _forward(self, batch: Batch, *, last: bool) -> Tensor:
        with self.task.phases("forward"):
            return self.task.strategy.forward(batch.inputs, last=last)

    def _loss(self, features: Tensor, part: slice, share: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the head's loss for the features [b, dim] of consecutive parts, times `share`, and
        its gradient [b, dim] times the loss scale (collective). Mixed rows count for two classes.
        """
        task = self.task
        labels, weights = targets(self.batches[part])
        leaf = features.detach().requires_grad_()
        rows = leaf if weights is None else torch.cat([leaf, leaf])
        known: dict[str, Any] = {}
        if not isinstance(task.head, FactoredHead):
            copies = 1 if weights is None else 2
            known["rows_of_ranks"] = [copies * num_rows for num_rows in self._rows_of_ranks(part)]
            if self.have_sets:
                known["labels_of_ranks"] = [sum(each[part]) for each in self._labels_of_ranks]
        # Run backward in this thread, so that `collective_hook` covers its collectives.
        with task.phases("head"), torch.autograd.set_multithreading_enabled(False):
            try:
                with task.autocast():
                    loss = task.head(rows, labels, weights, **known) * share
                (loss * task.loss_scale.value).backward()
            except FloatingPointError:  # the factored head checks its loss
                loss = torch.full((), torch.nan, device=task.world.device)
        broken = non_finite_rows(rows.detach())
        self.losses.append(PartLoss(loss.detach(), len(rows), broken))
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return loss.detach(), gradient

    def _rows_of_ranks(self, part: slice) -> list[int]:
        """Return the number of rows of each rank in consecutive parts; see `split_batch`."""
        num_parts = len(self.batches)
        return [
            rows * part.stop // num_parts - rows * part.start // num_parts
            for rows in self.task.rank_rows
        ]

    def _backward(self, features: Tensor, gradient: Tensor) -> None:
        # Activation checkpointing runs the forward pass of the blocks again, which would update the
        # batch norm buffers twice: restore their state after the first forward pass.
        task = self.task
        recomputes = task.recipe.train.activation_checkpointing
        buffers = BufferCopies(task.backbone) if recomputes else None
        with task.phases("backward"):
            task.strategy.backward(features, gradient)
        if buffers is not None:
            buffers.restore()


# ---------------------------------------------------------------- clipping and update


def gradient_norm(task: Task) -> Tensor:
    """Return the norm of all gradients, divided by the loss scale, as a float64 scalar on the
    device (collective). Each weight of the backbone and the head counts once."""
    with task.phases("optimizer"):
        squares = task.strategy.squared_gradient_norm() + task.head.squared_gradient_norm()
        return squares.sqrt() / task.loss_scale.value


def divide_gradients(task: Task, scale: float, norm: float, max_norm: float | None) -> None:
    """Divide all gradients by the loss scale, and clip their global `norm`, which is already
    divided by the loss scale, to `max_norm`."""
    factor = 1 / scale
    if max_norm is not None and norm > max_norm:
        factor *= max_norm / (norm + 1e-6)
    if factor != 1:
        with task.phases("optimizer"):
            torch._foreach_mul_(task.strategy.gradients(), factor)
            # `full` fills the tensor on the device. `tensor` would copy it from the host and wait.
            task.head.scale_gradients(torch.full((), factor, device=task.world.device))


def set_rates(task: Task, factor: float) -> None:
    """Set the learning rates to `factor` times their peaks, for a step whose gradients are not
    computed yet: the backward pass may already update class rows."""
    optimizer = task.recipe.optimizer
    set_rate(task.strategy.optimizer, optimizer.lr * factor)
    task.head_rate = optimizer.head_lr * factor
    if task.head_optimizer is not None:
        set_rate(task.head_optimizer, task.head_rate)


def update_weights(task: Task, *, step: int, skipped: Tensor | None = None) -> None:
    """Update the weights at the rates of `set_rates`, then clear the gradients (collective).

    The moving average does not change if `skipped`, a scalar on the device, is true.
    """
    with task.phases("optimizer"):
        task.strategy.step()
        if task.head_optimizer is not None:
            task.head_optimizer.step()
        if isinstance(task.head, FactoredHead):
            task.head.step(task.head_rate, task.recipe.optimizer.head_weight_decay)
        if task.average is not None:
            task.average.update(task.live(), step=step, skipped=skipped)
        task.zero_gradients()

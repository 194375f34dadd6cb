"""One training step, from a batch to updated weights: gradients, clipping, update and numbers.

A step must not change anything if its loss or its gradient norm is not finite. There are three ways
to decide this:

- On CPUs, the head checks its inputs, and the host reads the loss and the norm before the update.
- On GPUs, checks would make the host wait many times. The device computes a flag instead
  (`Task.is_flagged`), which the host reads once, before the update.
- If the optimizers read the flag themselves (`Task.defers`), the host does not wait at all. Where
  the flag is set, the weights, the moments, the moving average and the batch norm statistics keep
  their values, and an fp16 overflow lowers the loss scale. The host launches step t + 1, reads the
  results of step t, and then logs them or reports an error:

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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from data.loading.batch import Batch
from heads import FactoredHead
from heads.collectives import all_reduce_sum
from heads.engine.agreement import non_finite_rows
from heads.engine.inputs import NOTHING_COUNTS
from trainer.backbone.batch_norm import BufferCopies, follow_first_rank
from trainer.optimizers import set_rate
from trainer.task import Task
from trainer.world import random_state, set_random_state

_POLL_SECONDS = 1e-4
# A learned scale outside this range means that its training has collapsed or diverged.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-3, 1e5


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Numbers:
    """The loss and gradient norm of a step, on the host.

    `skipped`: the step changed nothing, because the loss or the gradient norm is not finite.
    `reason` states why, and is empty for other steps.
    """

    loss: float
    gradient_norm: float
    skipped: bool = False
    reason: str = ""


@dataclass(frozen=True)
class PartLoss:
    """The loss of a micro-batch on the device, and the rows of its features that are not finite.

    `broken_rows` are the `non_finite_rows` of the `num_rows` rows passed to the head.
    """

    loss: Tensor
    num_rows: int
    broken_rows: Tensor


class Event(Protocol):
    """The part of `torch.cuda.Event` that a host needs in order to wait."""

    def query(self) -> bool:
        """Return whether the device has completed all work recorded by the event."""


class DeferredNumbers:
    """The `loss` of a step, its gradient `norm` and whether it must be `skipped`: scalars on the
    device that are copied to the host without waiting.

    `part_weights` contains the sum of the row weights of each micro-batch over all ranks, or is
    None if every row has the weight 1. `log_scale` is the learned scale of the logits, if there is
    one. `event` completes when the copy is complete; it is None if the tensors are on the CPU.
    """

    event: Event | None = None
    _log_scale = 0.0

    def __init__(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        parts: Sequence[PartLoss],
        part_weights: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> None:
        self.step, self.parts, self.loss, self.norm = step, parts, loss, norm
        is_finite = loss.isfinite() & norm.isfinite()
        self.skipped = ~is_finite
        weight = torch.ones_like(norm) if part_weights is None else part_weights.sum().double()
        rows = [torch.cat([part.loss.double().reshape(1), part.broken_rows]) for part in parts]
        scale = torch.zeros_like(norm) if log_scale is None else log_scale.detach().double()
        numbers = torch.stack([loss.double(), norm, is_finite.double(), weight, scale])
        packed = torch.cat([numbers, *rows])
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self.event = copied
        else:
            self._host = packed

    def read(self, check: Callable[[], None]) -> tuple[float, float, bool]:
        """Wait for this step, but not for later ones. Return the loss, the gradient norm and
        whether the step was skipped.

        If a rank is lost, the collectives of the other ranks never end on their devices. While
        waiting, this calls `check` repeatedly, which must raise an error in that case.
        """
        while self.event is not None and not self.event.query():
            check()
            time.sleep(_POLL_SECONDS)
        loss, norm, is_finite, _, self._log_scale, *_ = self._host.tolist()
        return loss, norm, not is_finite

    def total_weight(self) -> float:
        """Return the sum of all row weights of the global batch. Call this after `read`."""
        return float(self._host[3])

    def log_scale(self) -> float:
        """Return the logarithm of the learned scale, or 0 without one. Call this after `read`."""
        return self._log_scale

    def broken_part(self) -> tuple[int, int, Tensor] | None:
        """Return the index, the number of rows and the `non_finite_rows` of the first micro-batch
        whose loss is NaN, if there is one. Call this after `read`."""
        rows = self._host[5:].view(len(self.parts), -1)
        broken = rows[:, 0].isnan().nonzero().flatten().tolist()
        if not broken:
            return None
        index = broken[0]
        return index, self.parts[index].num_rows, rows[index, 1:].long()


# ---------------------------------------------------------------- a step


def _no_check() -> None:
    """Do nothing, if there are no other ranks or if all of them are alive."""


def take_step(
    task: Task,
    batch: Batch,
    rate_factor: float,
    *,
    step: int,
    check: Callable[[], None] = _no_check,
) -> Numbers | DeferredNumbers:
    """Take a step at `rate_factor` times the peak learning rates (collective).

    If the task defers, the step is only launched, and `read_numbers` returns its numbers later.
    Otherwise, see `DeferredNumbers.read` for `check`.
    """
    copies = BufferCopies(task.backbone)
    set_rates(task, rate_factor)
    if task.defers:
        return _launch(task, batch, copies, step=step)
    if task.is_flagged:
        numbers = read_numbers(task, _compute(task, batch, step=step), check=check)
    else:
        numbers = _compute_checked(task, batch, step=step)
    if numbers.skipped:
        task.zero_gradients()
        copies.restore()
        return numbers
    with task.phases("optimizer"):
        _divide_gradients(task, numbers.gradient_norm, task.recipe.train.clip_norm)
    update_weights(task, step=step)
    return numbers


def read_numbers(
    task: Task,
    taken: Numbers | DeferredNumbers,
    *,
    explains: bool = True,
    check: Callable[[], None] = _no_check,
) -> Numbers:
    """Return the numbers of a step. Waits for the device if the step was deferred; see
    `DeferredNumbers.read` for `check`.

    If `explains` is true, the reason for a NaN loss names the ranks and rows (collective). Raises
    on every rank ValueError if no row of the global batch has a positive weight, and
    FloatingPointError if a learned scale has left its range.
    """
    if isinstance(taken, Numbers):
        if task.head.log_scale is not None:
            _check_scale(task.head.log_scale.item())
        return taken
    loss, norm, skipped = taken.read(check)
    _check_scale(taken.log_scale())
    if not skipped:
        return Numbers(loss, norm)
    if not taken.total_weight():
        raise ValueError(f"step {taken.step}: {NOTHING_COUNTS}")
    broken = taken.broken_part()
    if broken is None or not explains:
        return _skipped(task, loss, norm)
    part, num_rows, rows = broken
    error = task.head.nan_error(num_rows, rows.to(task.world.device))
    return _skipped(task, loss, norm, _error_of_part(task, error, part))


def _check_scale(log_scale: float) -> None:
    if not math.log(_SMALLEST_SCALE) <= log_scale <= math.log(_LARGEST_SCALE):
        raise FloatingPointError(
            f"the learned scale of the logits is e^{log_scale:.1f}, outside {_SMALLEST_SCALE:g} to "
            f"{_LARGEST_SCALE:g}: lower optimizer.head.lr, or set head.logits.learn_scale=false"
        )


def _skipped(
    task: Task, loss: float, norm: float, error: FloatingPointError | None = None
) -> Numbers:
    """Return the numbers of a step that changed nothing. `error` is that of the head, if any.

    Raises FloatingPointError if the backward pass had already updated class rows: they are updated
    if the loss is finite, before the gradients of the backbone are known.
    """
    reason = f"the loss is {loss} and the gradient norm is {norm}"
    if error is not None:
        reason = str(error).rpartition(": ")[0]  # its suggestion does not name recipe keys
    if task.recipe.optimizer.head.fused_sgd == "in_backward" and math.isfinite(loss):
        raise FloatingPointError(
            f"{reason}, but the class rows were already updated, so the step cannot be skipped: "
            "lower optimizer.lr or optimizer.head.lr, or set optimizer.head.fused_sgd=deferred"
        )
    return Numbers(loss, norm, True, reason)


def _compute_checked(task: Task, batch: Batch, *, step: int) -> Numbers:
    """Compute the gradients of a step, with checks of the head's inputs, and wait for them."""
    loss = norm = math.nan
    try:
        loss = float(compute_gradients(task, batch, step=step).loss)
        norm = gradient_norm(task)
    except FloatingPointError as error:
        return _skipped(task, loss, norm, error)
    if math.isfinite(loss) and math.isfinite(norm):
        return Numbers(loss, norm)
    return _skipped(task, loss, norm)


def _compute(task: Task, batch: Batch, *, step: int) -> DeferredNumbers:
    """Compute the gradients of a step, and start to copy its numbers to the host."""
    scale = loss_scale_of(task)
    found = compute_gradients(task, batch, step=step)
    with task.phases("optimizer"):
        norm = _scaled_gradient_norm(task) / scale
    log_scale = task.head.log_scale
    return DeferredNumbers(step, found.loss, norm, found.part_losses, found.part_weights, log_scale)


def _launch(task: Task, batch: Batch, copies: BufferCopies, *, step: int) -> DeferredNumbers:
    scale = loss_scale_of(task)
    numbers = _compute(task, batch, step=step)
    loss, norm, skipped = numbers.loss, numbers.norm, numbers.skipped
    with task.phases("optimizer"):
        excess = torch.ones_like(norm)
        if (max_norm := task.recipe.train.clip_norm) is not None:
            excess = excess.where(norm <= max_norm, (norm + 1e-6) / max_norm)
        # Class rows that are already updated cannot be divided. Then there is no loss scale.
        updates_early = task.recipe.optimizer.head.fused_sgd == "in_backward"
        divisor = None if updates_early else (scale * excess).float()
    assert task.head_optimizer is not None
    copies.restore_where(skipped)  # before the moving average reads the buffers
    with _flagged([task.strategy.optimizer, task.head_optimizer], divisor, skipped):
        update_weights(task, step=step, skipped=skipped)
    task.loss_scale.update_on_device(loss, skipped)
    return numbers


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


# ---------------------------------------------------------------- gradients


@dataclass(frozen=True)
class Gradients:
    """The loss of a step whose gradients have been added to the parameters.

    `loss` is the unscaled loss, a scalar on the device. If steps are flagged (`Task.is_flagged`),
    `part_losses` contains the losses of the micro-batches, and `part_weights` contains the sums of
    their row weights over all ranks (None if every row has the weight 1).
    """

    loss: Tensor
    part_losses: Sequence[PartLoss] = ()
    part_weights: Tensor | None = None


def compute_gradients(task: Task, batch: Batch, *, step: int) -> Gradients:
    """Compute the gradients of the mean loss over the global batch, multiplied by the loss scale
    (collective). `batch` contains this rank's rows.

    If the loss is a mean over rows, the gradients of the micro-batches are added up. If it couples
    the rows of the batch, or if the backward pass updates class rows, the head processes the whole
    global batch at once (gradient caching).

    If steps are not flagged (`Task.is_flagged`), raises FloatingPointError on every rank if the
    loss is NaN, without leaving gradients, and ValueError on every rank if a label is outside the
    classes. If steps are flagged, only the labels of the first batch are checked in this way. In
    later batches, only labels on the host are checked, and only the rank with the wrong label
    raises ValueError.
    """
    # A function of the step, so that a resumed run repeats the same draws. Each call of the head
    # adds 1.
    head, calls_once = task.head, task.recipe.calls_head_once
    head.draw = step if calls_once else step * task.micro_batches
    if task.is_flagged and task.has_checked_inputs:
        _check_labels(task, batch, step)
    parts = _Parts(task, split_batch(batch.to(task.world.device), task.micro_batches))
    if task.is_flagged and not task.has_checked_inputs:
        # These checks make the host wait. They also compare the label trees of the ranks.
        labels, weights = targets(parts.batches)
        features = torch.empty(len(labels), head.dim, device=task.world.device)
        head.check(features, labels, weights)
        task.has_checked_inputs = True
    caches = len(parts.batches) > 1 and calls_once
    loss = parts.backward_with_cached_gradients() if caches else parts.backward_one_by_one()
    if task.recipe.backbone.batch_norm == "local":
        follow_first_rank(task.backbone, task.world.group)
    return Gradients(loss, parts.losses, parts.weights if task.is_flagged else None)


def _check_labels(task: Task, batch: Batch, step: int) -> None:
    """Check labels that are on the host, where reading them is free. The loader has already checked
    the labels of batches that it copied to a GPU."""
    num_classes = task.head.num_classes
    second = [] if batch.mixed is None else [batch.mixed.labels]
    for labels in (batch.labels, *second):
        if labels.device.type != "cpu":
            continue
        found = labels.numpy()
        if len(found) and not 0 <= found.min() <= found.max() < num_classes:
            raise ValueError(
                f"step {step}, rank {task.world.rank}: labels are outside 0..{num_classes - 1} "
                f"({found.min()} to {found.max()}): check that the data and the head have the same "
                "classes"
            )


def _error_of_part(task: Task, error: FloatingPointError, index: int) -> FloatingPointError:
    """Prefix the head's error with its micro-batch, `index` (counted from 0), if the head computes
    the loss per micro-batch."""
    if task.micro_batches == 1 or task.recipe.calls_head_once:
        return error
    return FloatingPointError(f"micro-batch {index + 1} of {task.micro_batches}: {error}")


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch into `num_parts` batches of consecutive rows, some of which may be empty."""
    rows = len(batch.labels)
    ends = [rows * part // num_parts for part in range(num_parts + 1)]
    return [
        batch.each(lambda tensor, part=slice(*pair): tensor[part])  # type: ignore[misc]
        for pair in pairwise(ends)
    ]


def targets(parts: Sequence[Batch]) -> tuple[Tensor, Tensor | None]:
    """Return the labels of `parts` and their weights. The weights are None if there are no mixed
    rows.

    With mixed rows, the labels [2 b] are the first classes of all rows followed by their second
    classes. The loss of a mixed row is then the weighted mean of the losses for its two classes.
    With `batch_ce`, the loss is larger by log 2, because the partition sum contains every row
    twice.
    """
    labels = [part.labels for part in parts]
    second = [part.mixed for part in parts if part.mixed is not None]
    if not second:
        return torch.cat(labels), None
    shares = torch.cat([mixed.weights for mixed in second])
    labels += [mixed.labels for mixed in second]
    return torch.cat(labels), torch.cat([shares, 1 - shares])


@dataclass(frozen=True)
class _Parts:
    """The micro-batches of a step, and the losses computed so far if steps are flagged."""

    task: Task
    batches: list[Batch]
    losses: list[PartLoss] = field(default_factory=list)

    @cached_property
    def weights(self) -> Tensor | None:
        """The row weights of each part, summed over all ranks; None if every row has the weight 1
        and steps are flagged (collective)."""
        head = self.task.head
        if self.task.is_flagged and head.has_uniform_rows:
            return None
        sums = [head.row_weights(*targets([batch])).sum() for batch in self.batches]
        return all_reduce_sum(torch.stack(sums), self.task.world.group)

    def shares(self) -> Sequence[Tensor | float]:
        """Return the fraction of the global batch's row weights in each part (collective).

        If no row has a positive weight, the shares of a flagged step are NaN, so that it is
        skipped. If steps are not flagged, raises ValueError.
        """
        flagged, num_parts = self.task.is_flagged, len(self.batches)
        if not flagged and num_parts == 1:
            return [1.0]
        if self.weights is None:
            sizes = [sum(self._rows_of_ranks(slice(part, part + 1))) for part in range(num_parts)]
            return [size / self.task.global_batch for size in sizes]
        if flagged:
            return (self.weights / self.weights.sum()).unbind()
        if not self.weights.any():
            raise ValueError(NOTHING_COUNTS)
        shares: list[float] = (self.weights / self.weights.sum()).tolist()
        return shares

    def backward_one_by_one(self) -> Tensor:
        """Compute the gradients for a loss that is a mean over rows: weight each part by its share
        of the row weights.
        """
        task, shares = self.task, self.shares()
        task.head.accumulates = len(self.batches) > 1
        total, nan_error = torch.zeros((), device=task.world.device), None
        for index, batch in enumerate(self.batches):
            features = self._forward(batch, last=index == len(self.batches) - 1)
            gradient = torch.zeros_like(features)
            # The backward pass is collective. A part with zero weight, or one that follows a NaN
            # loss, runs it with zero gradients so that every rank issues the same collectives.
            if task.is_flagged or (nan_error is None and shares[index]):
                try:
                    loss, gradient = self._loss(features, slice(index, index + 1), shares[index])
                    total += loss
                except FloatingPointError as error:
                    nan_error = _error_of_part(task, error, index)
            self._backward(features, gradient)
        if nan_error is not None:
            task.zero_gradients()
            raise nan_error
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
        gradients = gradient.split([len(batch.labels) for batch in self.batches])
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
        with task.phases("head"):
            rows = leaf if weights is None else torch.cat([leaf, leaf])
            known: dict[str, Any] = {}
            if task.is_flagged:
                copies = 1 if weights is None else 2
                of_ranks = self._rows_of_ranks(part)
                known = {"rows_of_ranks": [copies * num_rows for num_rows in of_ranks]}
            with task.autocast():
                loss = task.head(rows, labels, weights, **known) * share
            # Run backward in this thread, so that `collective_hook` covers its collectives.
            with torch.autograd.set_multithreading_enabled(False):
                (loss * loss_scale_of(task)).backward()
        if task.is_flagged:
            broken = non_finite_rows(rows.detach())
            self.losses.append(PartLoss(loss.detach(), len(rows), broken))
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

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


def loss_scale_of(task: Task) -> Tensor | float:
    """Return the factor by which the loss of the next step is multiplied."""
    scale = task.loss_scale
    return scale.on_device(task.world.device) if task.defers else scale.value


def _scaled_gradient_norm(task: Task) -> Tensor:
    """Return the norm of all gradients, without dividing by the loss scale, as a float64 scalar on
    the device (collective)."""
    return (task.strategy.squared_gradient_norm() + task.head.squared_gradient_norm()).sqrt()


def gradient_norm(task: Task) -> float:
    """Return the norm of all gradients, divided by the loss scale (collective).

    The norm covers the whole model: each weight of the backbone and the head counts once.
    """
    with task.phases("optimizer"):
        return float(_scaled_gradient_norm(task)) / task.loss_scale.value


def clip_gradients(task: Task, max_norm: float | None) -> float:
    """Divide all gradients by the loss scale, clip their global norm to `max_norm`, and return the
    norm before clipping (collective)."""
    norm = gradient_norm(task)
    with task.phases("optimizer"):
        _divide_gradients(task, norm, max_norm)
    return norm


def _divide_gradients(task: Task, norm: float, max_norm: float | None) -> None:
    """Divide all gradients by the loss scale, and clip their global `norm`, which is already
    divided by the loss scale, to `max_norm`."""
    factor = 1 / task.loss_scale.value
    if max_norm is not None and norm > max_norm:
        factor *= max_norm / (norm + 1e-6)
    if factor != 1:
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

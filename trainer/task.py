"""A task: a backbone and a head, with a strategy, gradient computation and weight updates."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.loading.batch import Batch
from data.loading.order import share as share_of_batch
from heads import ClassHead, FactoredHead, build_head
from heads.collectives import all_reduce_sum
from heads.inputs import NOTHING_COUNTS
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import (
    BufferCopies,
    apply_batch_norm_mode,
    follow_first_rank,
    persistent_buffers,
)
from trainer.backbone.blocks import checkpoint_blocks, compile_blocks
from trainer.config import Recipe
from trainer.optimizers import build_head_optimizer, build_optimizer, set_rate
from trainer.steps.deferred import PartLoss, accepts_flag, create_momentum
from trainer.steps.ema import MovingAverage
from trainer.steps.loss_scale import LossScale
from trainer.steps.micro_batches import random_state, set_random_state, split_batch, targets
from trainer.strategies import Strategy
from trainer.telemetry.phases import Phases
from trainer.world import World

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Task(nn.Module):
    """A backbone that computes features and a head that computes the loss. Gradients are computed
    for the mean loss over the global batch.

    A new task can only be evaluated. To train it, call `start_training`, which creates the strategy
    and the optimizers.
    """

    head_optimizer: Optimizer | None = None
    average: MovingAverage | None = None
    # Whether the device sets a flag if a step must be skipped (`trainer/steps/deferred.py`). The
    # head then does not check its inputs, which would make the host wait.
    is_flagged = False
    # Whether the optimizers read the flag, so that the host can read it later.
    defers = False
    # If steps are flagged: the losses of the newest step's micro-batches, and the sums of their row
    # weights over all ranks (None if every row has the weight 1).
    part_losses: Sequence[PartLoss] = ()
    part_weights: Tensor | None = None
    # If steps are flagged: whether the first batch has been checked.
    _is_checked = False

    def __init__(
        self,
        backbone: Backbone,
        head: ClassHead,
        recipe: Recipe,
        world: World,
        phases: Phases | None = None,
    ) -> None:
        super().__init__()
        self.world, self.recipe = world, recipe
        self.phases = phases or Phases(world.device)
        train = recipe.train
        self.global_batch = train.global_batch
        # Do not use more parts than there are samples in the largest share: a part that is empty
        # on every rank would have no loss.
        self.micro_batches = min(train.micro_batches, -(-self.global_batch // world.size))
        apply_batch_norm_mode(backbone, recipe.backbone.batch_norm, world.group)
        backbone.precision = self.precision = _PRECISIONS[train.precision]
        backbone.channels_last = train.channels_last
        self.backbone = backbone.to(world.device)
        self.head = head
        self.num_backbone_weights = sum(p.numel() for p in self.backbone.parameters())
        self.loss_scale = LossScale.for_precision(train.precision)
        self.strategy = Strategy(self.backbone)

    def start_training(self) -> None:
        """Distribute the backbone over the ranks with the recipe's strategy and create the
        optimizers (collective)."""
        recipe, encoder = self.recipe, self.backbone.encoder
        train = recipe.train
        if train.channels_last and train.strategy.keeps_memory_format:
            # Skip this for sharded weights: they are gathered in contiguous layout and converted
            # where they are used.
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if train.compile:
            compile_blocks(encoder)
        if train.activation_checkpointing:
            checkpoint_blocks(encoder)
        if self.world.group is not None:  # there is nothing to distribute in one process
            self.strategy = train.strategy.start(self.backbone, self.world)
        strategy = self.strategy
        strategy.attach(
            build_optimizer(recipe.optimizer, strategy.parameters, strategy.shard_group)
        )
        self.head_optimizer = build_head_optimizer(recipe.optimizer, self.head)
        self.defers = self._defers()
        on_cuda = self.world.device.type == "cuda"
        self.is_flagged = self.defers or (on_cuda and not isinstance(self.head, FactoredHead))
        if self.defers:
            for optimizer in (self.strategy.optimizer, self.head_optimizer):
                create_momentum(optimizer)
        if train.ema is not None:
            self.average = MovingAverage(train.ema, self.live())

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return features [b, dim] in float32 on the device, for evaluation. Collective if the
        strategy shards weights: every rank must then call it the same number of times, with zero
        rows if necessary.
        """
        inputs = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with torch.no_grad():
            return self.strategy.forward(inputs).float()

    # ---- the gradients of a step ----

    def backward(self, batch: Batch, *, step: int) -> Tensor:
        """Compute the gradients of the mean loss over the global batch, multiplied by `loss_scale`,
        and return the unscaled loss (collective).

        If steps are not flagged, raises FloatingPointError on every rank, and leaves no gradients,
        if the loss is NaN, and ValueError on every rank if a label is outside the classes. If they
        are, the labels of the first batch are checked in the same way. Later, only labels on the
        host are checked, and only the rank with the label raises ValueError.
        """
        self.head.draw = step * self.micro_batches  # a resumed run repeats the same draws
        self.part_losses = []
        if self.is_flagged and self._is_checked:
            self._check_labels(batch, step)
        parts = list(split_batch(batch.to(self.world.device), self.micro_batches))
        if self.is_flagged:
            if not self._is_checked:
                self._check(parts)
            self.part_weights = None if self.head.has_uniform_rows else self._summed_weights(parts)
        if len(parts) > 1 and self.head.loss.couples_rows:
            loss = self._backward_with_cached_gradients(parts)
        else:
            loss = self._backward_part_by_part(parts)
        if self.recipe.backbone.batch_norm == "local":
            follow_first_rank(self.backbone, self.world.group)
        return loss

    def _check(self, parts: list[Batch]) -> None:
        """Check the labels and row weights of the first batch, and that all ranks use the same
        label tree (collective).

        Flagged steps skip these checks, which make the host wait, so they run only once.
        """
        labels, weights = targets(parts)
        self.head.check(self.head.weight.new_empty(len(labels), self.head.dim), labels, weights)
        self._is_checked = True

    def _check_labels(self, batch: Batch, step: int) -> None:
        """Check labels that are on the host, where reading them is free. The loader has already
        checked the labels of batches that it copied to a GPU."""
        num_classes = self.head.num_classes
        second = [] if batch.mixed is None else [batch.mixed.labels]
        for labels in (batch.labels, *second):
            if labels.device.type != "cpu":
                continue
            found = labels.numpy()
            if len(found) and not 0 <= found.min() <= found.max() < num_classes:
                raise ValueError(
                    f"step {step}, rank {self.world.rank}: labels are outside 0..{num_classes - 1} "
                    f"({found.min()} to {found.max()}): check that the data and the head have the "
                    "same classes"
                )

    def _backward_part_by_part(self, parts: list[Batch]) -> Tensor:
        """Compute the gradients for a loss that is a mean over rows: weight each part by its share
        of the row weights.
        """
        shares = self._flagged_shares(parts) if self.is_flagged else self._shares(parts)
        self.head.accumulates = len(parts) > 1
        total, nan_error = torch.zeros((), device=self.world.device), None
        for index, part in enumerate(parts):
            features = self._forward(part, last=index == len(parts) - 1)
            gradient = torch.zeros_like(features)
            # The backward pass is collective. A part with zero weight, or one that follows a NaN
            # loss, runs it with zero gradients so that every rank issues the same collectives.
            if self.is_flagged or (nan_error is None and shares[index]):
                try:
                    loss, gradient = self._loss(features, [part], shares[index], first_part=index)
                    total += loss
                except FloatingPointError as error:
                    nan_error = self.error_of_part(error, index)
            self._backward(features, gradient)
        if nan_error is not None:
            self.zero_gradients()
            raise nan_error
        with self.phases("head"):
            self.head.reduce_gradients()
        return total

    def error_of_part(self, error: FloatingPointError, index: int) -> FloatingPointError:
        """Prefix the head's error with its micro-batch, `index` (counted from 0), if the head
        computes the loss per micro-batch."""
        if self.micro_batches == 1 or self.head.loss.couples_rows:
            return error
        return FloatingPointError(f"micro-batch {index + 1} of {self.micro_batches}: {error}")

    def _shares(self, parts: list[Batch]) -> list[float]:
        """Return the fraction of the global batch's row weights in each part (collective)."""
        if len(parts) == 1:
            return [1.0]
        weights = self._summed_weights(parts)
        if not weights.any():
            raise ValueError(NOTHING_COUNTS)
        shares: list[float] = (weights / weights.sum()).tolist()
        return shares

    def _flagged_shares(self, parts: list[Batch]) -> Sequence[Tensor | float]:
        """Like `_shares`, but without waiting for the device. If no row has a positive weight, the
        shares are NaN, so the step is skipped."""
        if self.part_weights is None:
            rows = [sum(self._rows_of_ranks(part)) for part in range(len(parts))]
            return [count / self.global_batch for count in rows]
        return (self.part_weights / self.part_weights.sum()).unbind()

    def _summed_weights(self, parts: list[Batch]) -> Tensor:
        weights = torch.stack([self.head.row_weights(*targets([part])).sum() for part in parts])
        return all_reduce_sum(weights, self.world.group)

    def _rows_of_ranks(self, first: int, stop: int | None = None) -> list[int]:
        """Return the number of rows of each rank in the parts `first` to `stop` - 1, by default in
        the part `first`."""
        stop, num_parts = first + 1 if stop is None else stop, self.micro_batches
        return [rows * stop // num_parts - rows * first // num_parts for rows in self._rank_rows]

    @cached_property
    def _rank_rows(self) -> list[int]:
        """The number of rows of each rank in a global batch."""
        ranks = self.world.size
        return [len(share_of_batch(self.global_batch, rank, ranks)) for rank in range(ranks)]

    def _backward_with_cached_gradients(self, parts: list[Batch]) -> Tensor:
        """Compute the gradients for a loss that couples rows, so that the head must process the
        whole global batch at once.

        Gradient caching (Gao et al. 2021): compute the features of all parts without a graph, run
        the head once, then run the backbone's forward and backward passes part by part with the
        gradients of the features. By the chain rule, the gradient of each weight is the sum of its
        gradients over the parts, so the result is the same as for one large batch. Gradient caching
        requires only the memory for one part and the features, at the cost of a second forward
        pass.
        """
        device = self.world.device
        states, outputs = [], []
        with torch.no_grad():
            for part in parts:
                states.append(random_state(device))
                outputs.append(self._forward(part, last=False))
        after = random_state(device)
        # The head needs all rows: each row of the loss depends on the other rows of the batch.
        self.head.accumulates = False
        loss, gradient = self._loss(torch.cat(outputs), parts, 1.0, first_part=0)
        # The cached gradients are correct only for the features of the first pass. The second pass
        # therefore draws the same random numbers (dropout), and it must not update the batch norm
        # statistics again.
        buffers = BufferCopies(self.backbone)
        gradients = gradient.split([len(part.labels) for part in parts])
        for index, (part, state, grad) in enumerate(zip(parts, states, gradients, strict=True)):
            set_random_state(state, device)
            self._backward(self._forward(part, last=index == len(parts) - 1), grad)
        set_random_state(after, device)
        buffers.restore()
        return loss

    def _forward(self, part: Batch, *, last: bool) -> Tensor:
        with self.phases("forward"):
            return self.strategy.forward(part.inputs, last=last)

    def _loss(
        self,
        features: Tensor,
        parts: Sequence[Batch],
        share: Tensor | float,
        *,
        first_part: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the head's loss for the features [b, dim] of `parts`, times `share`, and its
        gradient [b, dim] times the loss scale (collective). Mixed rows count for two classes.

        `parts` are consecutive, and `first_part` is the index of the first one.
        """
        labels, weights = targets(parts)
        leaf = features.detach().requires_grad_()
        with self.phases("head"):
            rows = leaf if weights is None else torch.cat([leaf, leaf])
            known: dict[str, Any] = {}
            if self.is_flagged:
                of_ranks = self._rows_of_ranks(first_part, first_part + len(parts))
                copies = 1 if weights is None else 2
                known = {"rows_of_ranks": [copies * num_rows for num_rows in of_ranks]}
            with self._autocast():
                loss = self.head(rows, labels, weights, **known) * share
            # Run backward in this thread, so that `collective_hook` covers its collectives.
            with torch.autograd.set_multithreading_enabled(False):
                (loss * self.current_loss_scale()).backward()
        if self.is_flagged:
            self.part_losses = [*self.part_losses, PartLoss.of(loss.detach(), rows.detach())]
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def current_loss_scale(self) -> Tensor | float:
        """Return the factor by which this step's loss is multiplied."""
        scale = self.loss_scale
        return scale.on_device(self.world.device) if self.defers else scale.value

    def _backward(self, features: Tensor, gradient: Tensor) -> None:
        # Activation checkpointing runs the forward pass of the blocks again, which would update the
        # batch norm buffers twice: restore their state after the first forward pass.
        buffers = (
            BufferCopies(self.backbone) if self.recipe.train.activation_checkpointing else None
        )
        with self.phases("backward"):
            self.strategy.backward(features, gradient)
        if buffers is not None:
            buffers.restore()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.precision)

    # ---- the update ----

    def clip_gradients(self, max_norm: float | None) -> float:
        """Divide all gradients by the loss scale, clip their global norm to `max_norm`, and return
        the norm before clipping (collective).

        The norm covers the whole model: each weight of the backbone and the head counts once.
        """
        with self.phases("optimizer"):
            norm = float(self.scaled_gradient_norm()) / self.loss_scale.value
            self.divide_gradients(norm, max_norm)
        return norm

    def divide_gradients(self, norm: float, max_norm: float | None) -> None:
        """Divide all gradients by the loss scale, and clip their global `norm`, which is already
        divided by the loss scale, to `max_norm`."""
        factor = 1 / self.loss_scale.value
        if max_norm is not None and norm > max_norm:
            factor *= max_norm / (norm + 1e-6)
        if factor != 1:
            torch._foreach_mul_(self.strategy.gradients(), factor)
            # `full` fills the tensor on the device. `tensor` would copy it from the host and wait.
            self.head.scale_gradients(torch.full((), factor, device=self.world.device))

    def scaled_gradient_norm(self) -> Tensor:
        """Return the norm of all gradients, without dividing by the loss scale, as a float64 scalar
        on the device (collective)."""
        return (self.strategy.squared_gradient_norm() + self.head.squared_gradient_norm()).sqrt()

    def step(self, rate_factor: float, *, step: int, skipped: Tensor | None = None) -> None:
        """Update the weights at `rate_factor` times the peak learning rates, then clear the
        gradients (collective).

        The moving average does not change if `skipped`, a scalar on the device, is true.
        """
        optimizer = self.recipe.optimizer
        with self.phases("optimizer"):
            set_rate(self.strategy.optimizer, optimizer.lr * rate_factor)
            self.strategy.step()
            rate = optimizer.head_lr * rate_factor
            if self.head_optimizer is not None:
                set_rate(self.head_optimizer, rate)
                self.head_optimizer.step()
            if isinstance(self.head, FactoredHead):
                self.head.step(rate, optimizer.head_weight_decay)
            if self.average is not None:
                self.average.update(self.live(), step=step, skipped=skipped)
            self.zero_gradients()

    def _defers(self) -> bool:
        synchronous, reason = self.recipe.train.synchronous, None
        optimizers = [self.strategy.optimizer, self.head_optimizer]
        if self.world.size > 1 and not self.recipe.train.strategy.can_defer:
            reason = f"train.strategy.kind is {self.recipe.train.strategy.kind}"
        elif self.head_optimizer is None:
            reason = f"head.weights.kind is {self.recipe.head.weights.kind}"
        elif not all(optimizer and accepts_flag(optimizer) for optimizer in optimizers):
            reason = f"optimizer.kind is {self.recipe.optimizer.kind}, which ignores found_inf"
        if synchronous is None:
            return self.world.device.type == "cuda" and reason is None
        if not synchronous and reason is not None:
            raise ValueError(f"train.synchronous is false, but {reason}: omit train.synchronous")
        return not synchronous

    def zero_gradients(self) -> None:
        """Clear all gradients (collective)."""
        self.strategy.zero_gradients()
        self.head.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Release the objects that hold process groups, so that the groups can be destroyed."""
        self.strategy.close()
        self.head_optimizer = self.average = None

    # ---- averaged weights ----

    def live(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the averaged tensors: weights, and floating-point buffers
        such as those of batch norm."""
        pieces = self.strategy.live() | self._averaged_buffers
        live = {f"backbone.{name}": piece for name, piece in pieces.items()}
        return live | {f"head.{name}": p.detach() for name, p in self.head.named_parameters()}

    @cached_property
    def _averaged_buffers(self) -> dict[str, Tensor]:
        # Cached because every step reads them.
        buffers = persistent_buffers(self.backbone)
        return {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights with their moving averages inside the context, if the run has moving
        averages.
        """
        if self.average is None:
            yield
            return
        with self.average.swapped_in(self.live):
            yield


def build_task(
    recipe: Recipe,
    *,
    class_names: Sequence[str],
    label_vectors: np.ndarray | None,
    world: World,
    class_counts: np.ndarray | None = None,
    class_paths: Sequence[Sequence[str]] | None = None,
    phases: Phases | None = None,
) -> Task:
    """Build a recipe's task. The initial weights do not depend on the rank or the world size."""
    torch.manual_seed(recipe.seed)
    backbone = build_backbone(recipe.backbone, image=recipe.data.image)
    head = build_head(
        recipe.head,
        dim=backbone.dim,
        num_classes=len(class_names),
        class_names=class_names,
        label_vectors=label_vectors,
        mesh=world.mesh,
        seed=recipe.seed,
        device=world.device,
        class_counts=class_counts,
        class_paths=class_paths,
    )
    return Task(backbone, head, recipe, world, phases)

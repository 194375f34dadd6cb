"""Computes the gradients of a step for the mean loss over the global batch, micro-batch by
micro-batch.

If the loss is a mean over rows, the gradients of the micro-batches are added up. If it couples the
rows of the batch, or if the backward pass updates class rows, the head processes the whole global
batch at once (gradient caching).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from data.loading.batch import Batch
from heads.collectives import all_reduce_sum
from heads.engine.inputs import NOTHING_COUNTS
from trainer.backbone.batch_norm import BufferCopies, follow_first_rank
from trainer.steps.deferred import PartLoss
from trainer.steps.micro_batches import (
    random_state,
    rows_of_ranks,
    set_random_state,
    split_batch,
    targets,
)
from trainer.task import Task


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

    If steps are not flagged (`Task.is_flagged`), raises FloatingPointError on every rank if the
    loss is NaN, without leaving gradients, and ValueError on every rank if a label is outside the
    classes. If steps are flagged, only the labels of the first batch are checked in this way. In
    later batches, only labels on the host are checked, and only the rank with the wrong label
    raises ValueError.
    """
    head = task.head
    # A function of the step, so that a resumed run repeats the same draws. Each call of the head
    # adds 1.
    head.draw = step if task.recipe.calls_head_once else step * task.micro_batches
    if task.is_flagged and task.has_checked_inputs:
        _check_labels(task, batch, step)
    parts = _Parts(task, list(split_batch(batch.to(task.world.device), task.micro_batches)))
    if task.is_flagged and not task.has_checked_inputs:
        _check_inputs(task, parts.batches)
    caches = len(parts.batches) > 1 and task.recipe.calls_head_once
    loss = parts.backward_with_cached_gradients() if caches else parts.backward_one_by_one()
    if task.recipe.backbone.batch_norm == "local":
        follow_first_rank(task.backbone, task.world.group)
    return Gradients(loss, parts.losses, parts.weights if task.is_flagged else None)


def error_of_part(task: Task, error: FloatingPointError, index: int) -> FloatingPointError:
    """Prefix the head's error with its micro-batch, `index` (counted from 0), if the head computes
    the loss per micro-batch."""
    if task.micro_batches == 1 or task.recipe.calls_head_once:
        return error
    return FloatingPointError(f"micro-batch {index + 1} of {task.micro_batches}: {error}")


def _check_inputs(task: Task, parts: Sequence[Batch]) -> None:
    """Check the labels and row weights of the first batch, and that all ranks use the same label
    tree (collective).

    These checks make the host wait, so flagged steps run them only for the first batch.
    """
    labels, weights = targets(parts)
    features = torch.empty(len(labels), task.head.dim, device=task.world.device)
    task.head.check(features, labels, weights)
    task.has_checked_inputs = True


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
            sizes = [sum(self._rows_of_ranks(part, part + 1)) for part in range(num_parts)]
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
                    nan_error = error_of_part(task, error, index)
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
                of_ranks = self._rows_of_ranks(part.start, part.stop)
                known = {"rows_of_ranks": [copies * num_rows for num_rows in of_ranks]}
            with task.autocast():
                loss = task.head(rows, labels, weights, **known) * share
            # Run backward in this thread, so that `collective_hook` covers its collectives.
            with torch.autograd.set_multithreading_enabled(False):
                (loss * task.current_loss_scale()).backward()
        if task.is_flagged:
            self.losses.append(PartLoss.of(loss.detach(), rows.detach()))
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def _rows_of_ranks(self, first: int, stop: int) -> list[int]:
        """Return the number of rows of each rank in the parts `first` to `stop` - 1."""
        return rows_of_ranks(self.task.rank_rows, len(self.batches), first, stop)

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

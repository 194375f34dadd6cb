"""A task = backbone + head: it owns their strategy, the gradients of a step and the update."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.loading.batch import Batch
from heads import ClassHead, FactoredHead, build_head
from heads.collectives import all_reduce_sum
from heads.inputs import NOTHING_COUNTS
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import (
    apply_batch_norm_mode,
    copy_buffers,
    follow_first_rank,
    persistent_buffers,
    restore_buffers,
)
from trainer.backbone.blocks import checkpoint_blocks, compile_blocks
from trainer.config import Recipe
from trainer.optimizers import build_head_optimizer, build_optimizer, set_rate
from trainer.steps.ema import MovingAverage
from trainer.steps.loss_scale import LossScale
from trainer.steps.micro_batches import random_state, set_random_state, split_batch, targets
from trainer.strategies import Strategy
from trainer.telemetry.phases import Phases
from trainer.world import World

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Task(nn.Module):
    """Features from the backbone, loss from the head, gradients of the global-mean loss in both.

    It evaluates as it is made; `start_training` gives it its strategy and optimizers.
    """

    head_optimizer: Optimizer | None = None
    average: MovingAverage | None = None

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
        # No more parts than the largest share has samples: an empty part would have no loss.
        self.micro_batches = min(train.micro_batches, -(-self.global_batch // world.size))
        mode = recipe.backbone.batch_norm
        apply_batch_norm_mode(backbone, mode, world.group, world.device)
        backbone.precision = self.precision = _PRECISIONS[train.precision]
        backbone.channels_last = train.channels_last
        self.backbone = backbone.to(world.device)
        self.head = head
        self.num_backbone_weights = sum(p.numel() for p in self.backbone.parameters())
        self.loss_scale = LossScale.for_precision(train.precision)
        self.strategy = Strategy(self.backbone)

    def start_training(self) -> None:
        """Spread the backbone over the ranks as the recipe says, and make the optimizers
        (collective)."""
        recipe, encoder = self.recipe, self.backbone.encoder
        train = recipe.train
        if train.channels_last and train.strategy.keeps_memory_format:
            # A sharded weight is gathered as it lies flat, and turned where it is used.
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if train.compile:
            compile_blocks(encoder)
        if train.activation_checkpointing:
            checkpoint_blocks(encoder)
        if self.world.size > 1:  # there is nothing to distribute in one process
            self.strategy = train.strategy.start(self.backbone, self.world)
        self.strategy.attach(build_optimizer(recipe.optimizer, self.strategy.parameters))
        self.head_optimizer = build_head_optimizer(recipe.optimizer, self.head)
        if train.ema is not None:
            self.average = MovingAverage(train.ema, self.live())

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Features [b, dim] in float32 on the device, for evaluation. Collective under a strategy
        that shards: every rank calls it as often as the others, if need be without rows."""
        inputs = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with torch.no_grad():
            return self.strategy.forward(inputs).float()

    # ---- the gradients of a step ----

    def backward(self, batch: Batch, *, step: int) -> Tensor:
        """Fill every gradient with `loss_scale` times that of the global-mean loss; returns the
        loss (collective).

        Raises FloatingPointError on every rank, without gradients, where the loss is NaN.
        """
        self.head.draw = step * self.micro_batches  # a resumed run draws what this one would have
        parts = list(split_batch(batch.to(self.world.device), self.micro_batches))
        if len(parts) > 1 and self.head.loss.couples_rows:
            loss = self._backward_with_cached_gradients(parts)
        else:
            loss = self._backward_part_by_part(parts)
        if self.recipe.backbone.batch_norm == "local":
            follow_first_rank(self.backbone, self.world.group)
        return loss

    def _backward_part_by_part(self, parts: list[Batch]) -> Tensor:
        """For a loss that is a mean over rows: each part weighs what its rows do of all."""
        shares = self._shares(parts)
        self.head.accumulates = len(parts) > 1
        total, broken = torch.zeros((), device=self.world.device), None
        for index, part in enumerate(parts):
            features = self._forward(part, last=index == len(parts) - 1)
            gradient = torch.zeros_like(features)
            # Where its rows weigh nothing, or the loss is NaN, all ranks take part all the same.
            if broken is None and shares[index]:
                try:
                    loss, gradient = self._loss(features, [part], shares[index])
                    total += loss
                except FloatingPointError as error:
                    which = f"micro-batch {index + 1} of {len(parts)}: " if len(parts) > 1 else ""
                    broken = FloatingPointError(f"{which}{error}")
            self._backward(features, gradient)
        if broken is not None:
            self.zero_gradients()
            raise broken
        with self.phases("head"):
            self.head.reduce_gradients()
        return total

    def _shares(self, parts: list[Batch]) -> list[float]:
        """What each part's rows weigh of all rows of the global batch (collective)."""
        if len(parts) == 1:
            return [1.0]
        weights = torch.stack([self.head.row_weights(*targets([part])).sum() for part in parts])
        weights = all_reduce_sum(weights, self.world.group)
        if not weights.any():
            raise ValueError(NOTHING_COUNTS)
        shares: list[float] = (weights / weights.sum()).tolist()
        return shares

    def _backward_with_cached_gradients(self, parts: list[Batch]) -> Tensor:
        """For a loss that couples rows: the head sees the whole global batch at once.

        Features of all parts first, without graph; the head once; then the backbone again, part by
        part, with the features' gradients (gradient caching, Gao et al. 2021). The second pass
        draws the same random numbers, and batch-norm buffers keep what the first one left.
        """
        device = self.world.device
        states, outputs = [], []
        with torch.no_grad():
            for part in parts:
                states.append(random_state(device))
                outputs.append(self._forward(part, last=False))
        after = random_state(device)
        self.head.accumulates = False
        loss, gradient = self._loss(torch.cat(outputs), parts, 1.0)
        buffers = copy_buffers(self.backbone)
        gradients = gradient.split([len(part.labels) for part in parts])
        for index, (part, state, grad) in enumerate(zip(parts, states, gradients, strict=True)):
            set_random_state(state, device)
            self._backward(self._forward(part, last=index == len(parts) - 1), grad)
        set_random_state(after, device)
        restore_buffers(self.backbone, buffers)
        return loss

    def _forward(self, part: Batch, *, last: bool) -> Tensor:
        with self.phases("forward"):
            return self.strategy.forward(part.inputs, last=last)

    def _loss(
        self, features: Tensor, parts: Sequence[Batch], share: float
    ) -> tuple[Tensor, Tensor]:
        """The head's loss of the features [b, dim] of `parts` times `share`, and its gradient
        [b, dim] times the loss scale; mixed rows count for two classes (collective)."""
        labels, weights = targets(parts)
        leaf = features.detach().requires_grad_()
        with self.phases("head"):
            rows = leaf if weights is None else torch.cat([leaf, leaf])
            with self._autocast():
                loss = self.head(rows, labels, weights) * share
            (loss * self.loss_scale.value).backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def _backward(self, features: Tensor, gradient: Tensor) -> None:
        # Checkpointed blocks run once more: what their first forward left in the buffers stays.
        kept = copy_buffers(self.backbone) if self.recipe.train.activation_checkpointing else None
        with self.phases("backward"):
            self.strategy.backward(features, gradient)
        if kept is not None:
            restore_buffers(self.backbone, kept)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.precision)

    # ---- the update ----

    def clip_gradients(self, max_norm: float | None) -> float:
        """Take the loss scale out of all gradients and bound their global norm; the norm before
        (collective).

        The norm is over the whole model: each weight of the backbone and of the head once.
        """
        with self.phases("optimizer"):
            squared = self.strategy.squared_gradient_norm() + self.head.squared_gradient_norm()
            norm = float(squared.sqrt()) / self.loss_scale.value
            factor = 1 / self.loss_scale.value
            if max_norm is not None and norm > max_norm:
                factor *= max_norm / (norm + 1e-6)
            if factor != 1:
                torch._foreach_mul_(self.strategy.gradients(), factor)
                self.head.scale_gradients(torch.tensor(factor, device=self.world.device))
        return norm

    def step(self, rate_factor: float, *, step: int) -> None:
        """Update every weight with the gradients that there are, at so much of the peak rates, and
        forget the gradients (collective)."""
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
                self.average.update(self.live(), step=step)
            self.zero_gradients()

    def zero_gradients(self) -> None:
        """Forget all gradients (collective)."""
        self.strategy.zero_gradients()
        self.head.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Let go of what holds process groups: they could not be destroyed in peace."""
        self.strategy.close()
        self.head_optimizer = self.average = None

    # ---- averaged weights ----

    def live(self) -> dict[str, Tensor]:
        """This rank's pieces of all that is averaged: weights, and buffers such as batch norm's."""
        pieces = self.strategy.live() | self._averaged_buffers
        live = {f"backbone.{name}": piece for name, piece in pieces.items()}
        return live | {f"head.{name}": p.detach() for name, p in self.head.named_parameters()}

    @cached_property
    def _averaged_buffers(self) -> dict[str, Tensor]:
        # Once: every step asks for them.
        buffers = persistent_buffers(self.backbone)
        return {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their moving averages, if the run keeps those."""
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
    """The task of a recipe with its initial weights, the same on every rank and world size."""
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

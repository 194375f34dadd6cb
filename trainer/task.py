"""A task = backbone + head: it owns wrapping, the gradients of a step and checkpoint entries."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from data import Batch
from heads import ClassHead, FactoredHead, build_head
from heads.collectives import all_reduce_sum
from heads.engine import NOTHING_COUNTS
from trainer.backbone import Backbone, build_backbone
from trainer.batch_norm import apply_batch_norm_mode
from trainer.config import Recipe
from trainer.world import World


class Task(nn.Module):
    """Features from the backbone, loss from the head, gradients of the global-mean loss in both."""

    def __init__(self, backbone: Backbone, head: ClassHead, recipe: Recipe, world: World) -> None:
        super().__init__()
        self.world = world
        self.precision = recipe.train.precision
        self.global_batch = recipe.train.global_batch
        # No more parts than the largest share has samples: an empty part would have no loss.
        self.micro_batches = min(recipe.train.micro_batches, -(-self.global_batch // world.size))
        mode = recipe.backbone.batch_norm
        apply_batch_norm_mode(backbone, mode, world.group, world.device)
        self.backbone = backbone.to(world.device)
        self.head = head
        # Plain attribute: the wrapper must not appear in the names of parameters.
        object.__setattr__(self, "forward_backbone", self._wrapped(local_buffers=mode == "local"))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Features [b, dim] in float32 on the device, for evaluation."""
        inputs = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with torch.no_grad(), self._autocast():
            return self.backbone(inputs).float()

    def backward(self, batch: Batch, *, step: int) -> Tensor:
        """Fill every gradient with that of the global-mean loss; returns the loss (collective)."""
        self.head.draw = step * self.micro_batches  # a resumed run draws what this one would have
        parts = list(_split(batch.to(self.world.device), self.micro_batches))
        if len(parts) == 1:
            loss = self._loss(self._features(parts[0]), parts)
            loss.backward()
            return loss.detach()
        if self.head.loss.couples_rows:
            return self._backward_with_cached_gradients(parts)
        return self._backward_part_by_part(parts)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; the norm before (collective).

        The norm is over the whole model: the backbone once, every rank's shard of the head.
        """
        grads = [p.grad for p in self.backbone.parameters() if p.grad is not None]
        squared = self.head.squared_gradient_norm().float()
        norm = sum((grad.float().square().sum() for grad in grads), squared).sqrt()
        if max_norm is not None:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, scale)
            self.head.scale_gradients(scale)
        return norm

    def step(self, optimizer: Optimizer) -> None:
        """Update every weight with the gradients that there are (collective)."""
        optimizer.step()
        if isinstance(self.head, FactoredHead):
            decayed = optimizer.param_groups[0]
            self.head.step(decayed["lr"], decayed["weight_decay"])

    def checkpoint_entries(self, optimizer: Optimizer | None) -> dict[str, Tensor]:
        """Every tensor of the run by name; head shards and their moments as `Shard(0)` DTensors.

        None leaves the optimizer's out: what evaluation and export read.
        """
        entries: dict[str, Tensor] = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            entries[name] = self._entry(name, tensor.detach())
        for name, parameter in self.named_parameters():
            moments = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for key, value in moments.items():
                if isinstance(value, Tensor):
                    entry = self._entry(name, value) if value.ndim else value
                    entries[f"optimizer.{name}.{key}"] = entry
        return entries

    def create_optimizer_state(self, optimizer: Optimizer) -> None:
        """Make the moments exist, so that a checkpoint has somewhere to load them into."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the decay of AdamW is scaled by it: nothing moves
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _entry(self, name: str, tensor: Tensor) -> Tensor:
        return self.head.sharded(tensor) if name.startswith("head.") else tensor

    def _wrapped(self, *, local_buffers: bool) -> nn.Module:
        if self.world.size == 1:
            return self.backbone
        # Synchronised buffers are equal on all ranks already; local ones follow rank 0.
        wrapper = DistributedDataParallel(self.backbone, forward_sync_buffers=local_buffers)
        wrapper.register_comm_hook(None, _sum_gradients)
        return wrapper

    def _features(self, part: Batch) -> Tensor:
        with self._autocast():
            features: Tensor = self.forward_backbone(part.inputs)  # type: ignore[operator]
        return features

    def _loss(self, features: Tensor, parts: Sequence[Batch]) -> Tensor:
        """The head's loss of the features [b, dim] of `parts`; mixed rows count for two classes."""
        labels, weights = _targets(parts)
        if weights is not None:
            features = torch.cat([features, features])
        with self._autocast():
            loss: Tensor = self.head(features, labels, weights)
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.world.device.type, torch.bfloat16, enabled=self.precision == "bf16"
        )

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are summed over ranks once, in the last part's backward."""
        wrapper = self.forward_backbone
        if last or not isinstance(wrapper, DistributedDataParallel):
            return nullcontext()
        return wrapper.no_sync()

    def _backward_part_by_part(self, parts: list[Batch]) -> Tensor:
        """For a loss that is a mean over rows: each part weighs what its rows do of all."""
        weights = torch.stack([self.head.row_weights(*_targets([part])).sum() for part in parts])
        weights = all_reduce_sum(weights, self.world.group)
        if not weights.any():
            raise ValueError(NOTHING_COUNTS)
        shares = weights / weights.sum()
        total = torch.zeros((), device=self.world.device)
        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            with self._synchronised(last=index == len(parts) - 1):
                features = self._features(part)
                # Where its rows weigh nothing, all ranks take part all the same.
                weighs = share > 0
                loss = self._loss(features, [part]) * share if weighs else features.sum() * 0
                loss.backward()
            total += loss.detach()
        return total

    def _backward_with_cached_gradients(self, parts: list[Batch]) -> Tensor:
        """For a loss that couples rows: the head sees the whole global batch at once.

        Features of all parts first, without graph; the head once; then the backbone again, part by
        part, with the features' gradients (gradient caching, Gao et al. 2021). The second pass
        draws the same random numbers, and batch-norm buffers keep what the first one left.
        """
        states, outputs = [], []
        with torch.no_grad():
            for part in parts:
                states.append(_random_state(self.world.device))
                outputs.append(self._features(part))
        features = torch.cat(outputs).requires_grad_()
        loss = self._loss(features, parts)
        loss.backward()
        assert features.grad is not None
        gradients = features.grad.split([len(part.labels) for part in parts])
        buffers = [buffer.clone() for buffer in self.backbone.buffers()]
        after = _random_state(self.world.device)
        for index, (part, state, grad) in enumerate(zip(parts, states, gradients, strict=True)):
            _restore_random_state(state, self.world.device)
            with self._synchronised(last=index == len(parts) - 1):
                self._features(part).backward(grad)
        _restore_random_state(after, self.world.device)
        with torch.no_grad():
            for buffer, kept in zip(self.backbone.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        return loss.detach()


def build_task(
    recipe: Recipe,
    *,
    class_names: Sequence[str],
    label_vectors: np.ndarray | None,
    world: World,
    class_counts: np.ndarray | None = None,
    class_paths: Sequence[Sequence[str]] | None = None,
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
    return Task(backbone, head, recipe, world)


def _sum_gradients(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP would average; the head's feature gradients are those of the global mean already."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _targets(parts: Sequence[Batch]) -> tuple[Tensor, Tensor | None]:
    """Labels and what they weigh: of `parts` as they are, and once more with their second classes,
    where rows are mixed. The loss of a row of two classes is then the weighted mean of those for
    each; that of `batch_ce` is larger by log 2, for its partition sum has all rows twice."""
    labels = [part.labels for part in parts]
    second = [part.mixed for part in parts if part.mixed is not None]
    if not second:
        return torch.cat(labels), None
    shares = torch.cat([mixed.weights for mixed in second])
    labels += [mixed.labels for mixed in second]
    return torch.cat(labels), torch.cat([shares, 1 - shares])


def _split(batch: Batch, num_parts: int) -> Iterator[Batch]:
    rows = len(batch.labels)
    for part in range(num_parts):
        begin, end = rows * part // num_parts, rows * (part + 1) // num_parts
        yield batch.each(lambda tensor, begin=begin, end=end: tensor[begin:end])  # type: ignore[misc]


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _restore_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)

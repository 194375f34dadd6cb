"""The backbone of a plan: its weights, and the memory and work of one forward and backward pass of
the real encoder over tensors without memory (`trainer/backbone/trace.py`)."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.backbone.backbone import Backbone
from trainer.backbone.batch_norm import BATCH_NORMS, GroupBatchNorm, apply_batch_norm_mode
from trainer.backbone.blocks import checkpoint_blocks, large_tables, repeated_blocks
from trainer.backbone.trace import FakeBackbone, Recorder, Work, apply_cuda_rules, num_bytes
from trainer.config import Recipe

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class BackboneCost:
    """The cost of a micro-batch of `rows` samples, in bytes unless stated otherwise.

    units: the shapes of the weights that FSDP gathers together; those outside the blocks are last.
    norms: channels of each synchronized batch norm.
    activations: live at the end of forward. backward: largest number of live bytes in the backward
    pass, without the gradients of the weights. Neither includes weights or inputs.
    """

    dim: int
    rows: int
    units: tuple[tuple[torch.Size, ...], ...]
    norms: tuple[int, ...]
    buffers: int
    inputs: int
    activations: int
    backward: int
    feature_bytes: int
    forward_work: Counter[Work]
    backward_work: Counter[Work]

    @property
    def numel(self) -> int:
        """Number of weights."""
        return sum(self.padded())

    def padded(self, ranks: int = 1) -> list[int]:
        """Return the number of weights of each unit once the rows of each tensor are padded to a
        multiple of `ranks`."""
        return [
            sum(
                -(-rows // ranks) * ranks * math.prod(rest)
                for rows, *rest in (shape or (1,) for shape in unit)
            )
            for unit in self.units
        ]

    @property
    def flops(self) -> int:
        """Floating-point operations of products and convolutions, forward and backward."""
        work = self.forward_work + self.backward_work
        return sum(each.flops * number for each, number in work.items())

    def at(self, rows: int, other: "BackboneCost") -> "BackboneCost":
        """Return the memory with another number of rows, on the line through two costs."""
        share = (rows - other.rows) / max(1, self.rows - other.rows)
        sizes = {
            name: math.ceil(b + share * (a - b))
            for name in ("inputs", "activations", "backward")
            for a, b in ((getattr(self, name), getattr(other, name)),)
        }
        return replace(self, rows=rows, **sizes)


def trace_backbone(recipe: Recipe, *, rows: int, ranks: int, cuda: bool) -> BackboneCost:
    """Run the recipe's encoder once on `rows` fake samples, without computing anything."""
    train, half = recipe.train, _PRECISIONS[recipe.train.precision]
    fake = FakeBackbone(recipe.backbone, recipe.data.image)
    backbone, mode = fake.backbone, recipe.backbone.batch_norm
    with fake.mode:
        units = tuple(_units(backbone))
        layers = [part for part in backbone.modules() if type(part) in BATCH_NORMS]
        norms = tuple(layer.num_features for layer in layers) if mode == "sync" else ()
        blocks = list(repeated_blocks(backbone.encoder))
        if cuda:  # before activation checkpointing wraps the blocks
            for part in (*blocks, backbone):
                apply_cuda_rules(part, autocast=half is not None)
        if train.activation_checkpointing:
            checkpoint_blocks(backbone.encoder)
        if mode == "sync" and ranks > 1 and not cuda:
            # CPUs have no kernels for it, so it needs more temporaries than batch norm.
            for layer in layers:
                layer.__class__ = GroupBatchNorm
        apply_batch_norm_mode(backbone, mode, None)
        backbone.precision, backbone.channels_last = half, train.channels_last
        if half is not None and ranks > 1 and train.strategy.weight_precision is not None:
            _round_weights(backbone, half)
        inputs = _inputs(recipe, backbone, rows)
        recorder = Recorder([*backbone.parameters(), *backbone.buffers(), *inputs.values()])
        with recorder:
            features = backbone(inputs)
            activations, forward = recorder.live, recorder.work
            recorder.reset()
            features.backward(torch.empty_like(features))
    return BackboneCost(
        dim=backbone.dim,
        rows=rows,
        units=units,
        norms=norms,
        buffers=num_bytes(backbone.buffers()),
        inputs=num_bytes(inputs.values()),
        activations=activations,
        backward=recorder.peak - num_bytes(backbone.parameters()),
        feature_bytes=features.itemsize,
        forward_work=forward,
        backward_work=recorder.work,
    )


def _units(backbone: Backbone) -> Iterator[tuple[torch.Size, ...]]:
    """Yield the shapes of the weights that FSDP gathers together (`trainer/strategies/fsdp.py`)."""
    grouped: set[int] = set()
    for module in (*repeated_blocks(backbone.encoder), *large_tables(backbone.encoder), backbone):
        own = [p for p in module.parameters() if id(p) not in grouped]
        grouped.update(id(p) for p in own)
        if own:
            yield tuple(p.shape for p in own)


def _round_weights(backbone: nn.Module, dtype: torch.dtype) -> None:
    for module in backbone.modules():
        if not isinstance(module, _BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def _inputs(recipe: Recipe, backbone: Backbone, rows: int) -> dict[str, Tensor]:
    if backbone.modality == "text":
        text = recipe.data.text
        if text is None:
            raise ValueError("the backbone reads texts, but data.text is not set: set it")
        tokens = torch.ones(rows, text.max_length, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens.clone()}
    side = recipe.data.largest_side
    shape = (rows, recipe.data.image.channels, side, side)
    return {"pixel_values": torch.zeros(shape, dtype=torch.uint8)}

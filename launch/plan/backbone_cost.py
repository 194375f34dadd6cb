"""The cost of the backbone: its weights by FSDP unit, and the memory, traffic and operations of
one forward and backward pass.

The real encoder runs on fake tensors (`FakeTensorMode`) of the real shapes, so no code here depends
on the architecture.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from launch.plan.fake_world import fake_world
from launch.plan.operations import OperationRecorder, Operations
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import BATCH_NORMS, apply_batch_norm_mode
from trainer.backbone.blocks import checkpoint_blocks, large_tables, repeated_blocks
from trainer.config import Recipe
from trainer.strategies.cost import Shapes, numel

# More ranks launch the same kernels, on larger tensors of gathered statistics.
_RANKS = 2
# Autocast runs these in float32 on CUDA, but in 16-bit precision on the CPU.
_IN_FLOAT32 = (F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.layer_norm)
_IS_CUDA: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BackboneCost:
    """The cost of a backbone for a micro-batch of `rows` samples, in bytes unless stated otherwise.

    units: the shapes of the weights, grouped as FSDP gathers them; the root unit is last.
    norms: the shapes of the weights of batch norm if the strategy keeps only them in float32, and
    otherwise nothing, because `units` contains them.
    inputs: the micro-batch on the device.
    activations: bytes that are live at the end of forward. backward_peak: largest number of bytes
    that are live during backward, including `gradients`, the bytes of the weights' gradients.
    Neither includes weights or inputs. batch_norms: channels of each synchronized layer.
    norms_again: channels of the synchronized layers that activation checkpointing recomputes.
    forward, backward: the operations of each pass.
    """

    dim: int
    rows: int
    units: tuple[Shapes, ...]
    norms: Shapes
    buffer_shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inputs: int
    batch_norms: tuple[int, ...]
    norms_again: tuple[int, ...]
    activations: int
    backward_peak: int
    gradients: int
    feature_itemsize: int
    forward: Operations
    backward: Operations

    @property
    def numel(self) -> int:
        """Number of weights in the backbone."""
        return sum(numel(unit) for unit in (self.norms, *self.units))

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        return (shape for unit in (self.norms, *self.units) for shape in unit)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products and convolutions, forward and backward."""
        return sum(each.flops * num for each, num in (self.forward + self.backward).items())

    @property
    def buffers(self) -> int:
        """Bytes of the buffers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.buffer_shapes)


def measure_backbone(recipe: Recipe, *, rows: int, ranks: int, cuda: bool) -> BackboneCost:
    """Run the recipe's encoder once on `rows` fake samples, without computing anything.

    If there are several ranks, synchronized batch norm runs in a fake world of two.
    """
    train = recipe.train
    half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]
    with ExitStack() as stack:
        world = stack.enter_context(fake_world((1, min(_RANKS, ranks))))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        config = recipe.backbone.without_weights()
        with no_init_weights():  # fake tensors do not support all initializations
            backbone = build_backbone(config, image=recipe.data.image).train()
        rounds = half is not None and ranks > 1 and train.strategy.weight_precision is not None
        apart = _batch_norm_weights(backbone) if rounds else []
        units = tuple(_units(backbone, apart))
        mode = recipe.backbone.batch_norm
        synchronized = _sync_batch_norms(backbone, mode)
        again: tuple[int, ...] = ()
        blocks = list(repeated_blocks(backbone.encoder))
        if cuda:
            for part in (*blocks, backbone):
                _apply_cuda_rules(part, autocast=half is not None)
        if train.activation_checkpointing:
            again = tuple(c for block in blocks for c in _sync_batch_norms(block, mode))
            checkpoint_blocks(backbone.encoder)
        apply_batch_norm_mode(backbone, mode, world.group)
        backbone.precision, backbone.channels_last = half, train.channels_last
        if rounds:
            assert half is not None
            _round_weights(backbone, half)
        inputs = _inputs(recipe, backbone, rows)
        known = [*backbone.parameters(), *backbone.buffers(), *inputs.values()]
        recorder = OperationRecorder(known)
        with recorder:
            features = backbone(inputs)
            activations, forward = recorder.live, recorder.operations
            recorder.reset()
            features.backward(torch.empty_like(features))
    return BackboneCost(
        dim=backbone.dim,
        rows=rows,
        units=units,
        norms=tuple(tuple(p.shape) for p in apart),
        buffer_shapes=tuple((tuple(each.shape), each.dtype) for each in backbone.buffers()),
        inputs=_bytes(iter(inputs.values())),
        batch_norms=synchronized,
        norms_again=again,
        activations=activations,
        backward_peak=recorder.peak,
        gradients=_bytes(backbone.parameters()),
        feature_itemsize=features.itemsize,
        forward=forward,
        backward=recorder.operations,
    )


def _batch_norm_weights(backbone: Backbone) -> list[nn.Parameter]:
    layers = (module for module in backbone.modules() if isinstance(module, _BatchNorm))
    return [parameter for layer in layers for parameter in layer.parameters()]


def _units(backbone: Backbone, apart: Iterable[nn.Parameter]) -> Iterator[Shapes]:
    """Yield the shapes of the weights of each FSDP unit, as in `trainer/strategies/fsdp.py`.
    `apart` are weights of another unit."""
    grouped = {id(parameter) for parameter in apart}
    for module in (*repeated_blocks(backbone.encoder), *large_tables(backbone.encoder), backbone):
        own = [p for p in module.parameters() if id(p) not in grouped]
        grouped.update(id(p) for p in own)
        if own:
            yield tuple(tuple(p.shape) for p in own)


def _round_weights(backbone: Backbone, dtype: torch.dtype) -> None:
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


def _sync_batch_norms(backbone: nn.Module, mode: str) -> tuple[int, ...]:
    if mode != "sync":
        return ()
    layers = (m for m in backbone.modules() if isinstance(m, _BatchNorm))
    return tuple(layer.num_features for layer in layers if type(layer) in BATCH_NORMS)


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _apply_cuda_rules(module: nn.Module, *, autocast: bool) -> None:
    """Run the forward pass of a module with `CudaRules`, also if activation checkpointing repeats
    it in the backward pass, where autograd disables outer modes."""
    forward = module.forward

    def with_rules(*args: Any, **kwargs: Any) -> Any:
        with CudaRules(autocast=autocast):
            return forward(*args, **kwargs)

    module.forward = with_rules


class CudaRules(TorchFunctionMode):
    """Makes fake CPU tensors use as much memory as CUDA tensors would.

    Dropout saves a mask of one byte per element, attention does not save probabilities, and
    autocast computes norms and softmax in float32. The tensors report that they are on CUDA, so
    that `trainer/backbone/batch_norm.py` calls its CUDA kernels.
    """

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA:
            return True
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        if self._autocast and func in _IN_FLOAT32:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    del inplace
    if not training or p == 0:
        return input
    out: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return out

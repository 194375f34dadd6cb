"""The work and the memory of a backbone, recorded from a pass over tensors without memory.

The real encoder runs under torch's `FakeTensorMode`, so no code here depends on the architecture
and a model of any size takes a second. `kway plan` uses the cost of a training step.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.batch_norm import BATCH_NORMS, GroupBatchNorm, apply_batch_norm_mode
from trainer.backbone.blocks import checkpoint_blocks, large_tables, repeated_blocks
from trainer.backbone.config import BackboneConfig
from trainer.config import Recipe

aten = torch.ops.aten

# The kind of an operation, which determines the rate of its products. half: products of 16-bit
# numbers. convolution, single: products of float32 numbers. other: no products.
Kind = Literal["half", "convolution", "single", "other"]
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# Operations that only allocate or describe a tensor, in addition to views.
_WITHOUT_KERNEL = (
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided, aten.scalar_tensor, aten.lift_fresh),
)
# These do not read the tensor that they write, read only parts of it, or change only parts of it.
_OVERWRITING = (aten.copy_, aten.fill_, aten.zero_)
_SELECTING = (aten.embedding, aten.gather, aten.index, aten.index_select)
_CHANGING = (aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_, aten.index_put_)
# torch's formulas do not cover the attention kernels of CPUs. Backward has five products, because
# it computes the scores again. Values: the position of the queries, and the number of products.
_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5),
}
# Autocast runs these in float32 on CUDA, but in 16-bit precision on CPUs.
_IN_FLOAT32 = (F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.layer_norm)
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Work(NamedTuple):
    """One operation: the floating-point operations of its products, and the bytes that it reads
    and writes if each tensor moves once."""

    kind: Kind
    flops: int
    bytes: int


class Recorder(TorchDispatchMode):
    """Records the work of every operation inside its context, and the bytes of live tensors, except
    for those of `known` tensors."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self._live: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0
        self.work: Counter[Work] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        out = func(*args, **kwargs)
        if (
            func.namespace == "aten"
            and not _is_view(func, args, out)
            and packet not in _WITHOUT_KERNEL
        ):
            self.work[_work(packet, args, kwargs, out)] += 1
        for tensor in _tensors(out):
            self._track(tensor)
        return out

    @property
    def bytes(self) -> int:
        """Bytes that all operations read and write."""
        return sum(each.bytes * number for each, number in self.work.items())

    def reset(self) -> None:
        """Clear the work, and restart the peak at the bytes that are live now."""
        self.work, self.peak = Counter(), self.live

    def _track(self, tensor: Tensor) -> None:
        # Count storages, not tensors: a storage is live until the last of its views is freed.
        storage, key = tensor.untyped_storage(), _storage(tensor)
        size = storage.nbytes()
        if key in self._known or key in self._live:
            return
        self._live[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        del self._live[key]
        self.live -= size


def _work(packet: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Work:
    inputs, written = _tensors((args, kwargs)), _bytes(_tensors(out))
    moved = _bytes(inputs) + written
    if packet in _OVERWRITING:
        moved -= _bytes(inputs[:1])
    elif packet in _SELECTING:
        moved = _bytes(inputs[1:]) + 2 * written
    elif packet in _CHANGING:
        moved = 2 * _bytes(inputs[1:])
    if packet in _CPU_ATTENTION:
        first, products = _CPU_ATTENTION[packet]
        flops = 2 * products * args[first].numel() * args[first + 1].shape[-2]
    else:
        count = flop_registry.get(packet)
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    kind: Kind = "convolution" if packet in _CONVOLUTIONS else "single"
    if any(tensor.itemsize == 2 for tensor in inputs):
        kind = "half"
    return Work(kind if flops else "other", flops, moved)


def _is_view(func: Any, args: Any, out: Any) -> bool:
    """Return whether the result shares the memory of an argument that is not changed in place."""
    if func.is_view:
        return True
    shared = isinstance(out, Tensor) and _storage(out) in map(_storage, _tensors(args))
    return shared and not func.name().partition(".")[0].endswith("_")


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, list | tuple):
        return [tensor for part in tree for tensor in _tensors(part)]
    if isinstance(tree, dict):
        return _tensors(list(tree.values()))
    return [tree] if isinstance(tree, Tensor) else []


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


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
    config, mode = recipe.backbone, recipe.backbone.batch_norm
    if isinstance(config, BackboneConfig):
        config = config.model_copy(update={"weights": "random"})  # only the shapes matter
    with torch.device("meta"):
        backbone = build_backbone(config, image=recipe.data.image).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        backbone.to_empty(device="cpu")
        units = tuple(_units(backbone))
        layers = [part for part in backbone.modules() if isinstance(part, BATCH_NORMS)]
        layers = [layer for layer in layers if type(layer) in BATCH_NORMS]  # not subclasses
        norms = tuple(layer.num_features for layer in layers) if mode == "sync" else ()
        blocks = list(repeated_blocks(backbone.encoder))
        if cuda:  # before activation checkpointing wraps the blocks
            for part in (*blocks, backbone):
                _apply_cuda_rules(part, autocast=half is not None)
        if train.activation_checkpointing:
            checkpoint_blocks(backbone.encoder)
        if mode == "sync" and ranks > 1 and not cuda:
            # CPUs have no kernels for it, so it needs more temporaries than batch norm.
            for layer in layers:
                layer.__class__ = GroupBatchNorm
        apply_batch_norm_mode(backbone, mode, None)
        backbone.precision, backbone.channels_last = half, train.channels_last
        if half is not None and ranks > 1 and train.strategy.weight_precision is not None:
            for module in backbone.modules():
                if not hasattr(module, "running_mean"):  # batch norm
                    for parameter in module.parameters(recurse=False):
                        parameter.data = parameter.data.to(half)
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
        buffers=_bytes(backbone.buffers()),
        inputs=_bytes(inputs.values()),
        activations=activations,
        backward=recorder.peak - _bytes(backbone.parameters()),
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


def _apply_cuda_rules(module: nn.Module, *, autocast: bool) -> None:
    """Make the forward pass of a module on CPU tensors keep what it would keep on CUDA, also if
    activation checkpointing repeats it in the backward pass, where autograd disables outer modes.
    """
    forward = module.forward

    def with_rules(*args: Any, **kwargs: Any) -> Any:
        with _CudaRules(autocast=autocast):
            return forward(*args, **kwargs)

    module.forward = with_rules


class _CudaRules(TorchFunctionMode):
    """Dropout keeps a mask of one byte per element, attention does not keep probabilities, and
    autocast computes norms and softmax in float32."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        if self._autocast and func in _IN_FLOAT32:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    if not training or p == 0:
        return input
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out

"""Records the live bytes of torch operations as they run, and the work of each operation.

Under `FakeTensorMode` nothing is computed or allocated, so models of any size can be recorded.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from heads.tiles.operators import write_gradient, write_statistics

aten = torch.ops.aten

# The kind of an operation's products, which determines their rate. half: 16-bit inputs.
# convolution: a float32 convolution, which cuDNN computes in TF32 by default
# (`torch.backends.cudnn.allow_tf32`). single: any other float32 product, which uses TF32 only with
# `train.tf32`.
Products = Literal["half", "convolution", "single"]
_CONVOLUTIONS = (aten.convolution, aten._convolution, aten.convolution_backward)

# Operations that return a tensor without launching a kernel, in addition to views.
_WITHOUT_KERNEL = (
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided, aten.scalar_tensor, aten._unsafe_view),
    *(aten.lift_fresh, aten.resize_, aten.set_, aten.as_strided_),
)
# Operations that read only the selected rows or elements of their first tensor.
_SELECTING = (aten.index, aten.index_select, aten.gather, aten.embedding)
# Operations that change only the selected rows or elements of their first tensor.
_CHANGING_PARTS = (
    *(aten.index_put_, aten.index_add_, aten.index_copy_, aten.scatter_, aten.scatter_add_),
    aten.index_fill_,
)
# Operations that do not read the tensor that they write.
_OVERWRITING = (aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_)
_EMBEDDING_BAGS = (aten._embedding_bag, aten._embedding_bag_forward_only)
# A kernel for lists of tensors processes at most this many chunks, and, depending on the number of
# lists, this many tensors per launch (ATen/native/cuda/MultiTensorApply.cuh).
_CHUNK, _CHUNKS = 65_536, 320
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


@dataclass(frozen=True)
class TensorShape:
    """The properties of a tensor that determine the time of an operation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """An operation and its arguments, with a `TensorShape` for each tensor."""

    function: Any
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Operation:
    """The work of one operation.

    flops: floating-point operations of its matrix products. bytes: bytes read and written.
    launches: kernels that it launches on a GPU. waits: 1 if the host must wait for its result, and
    otherwise 0. call: None for an operation that cannot be repeated, such as a collective.
    """

    flops: int = 0
    bytes: int = 0
    products: Products = "single"
    launches: int = 1
    waits: int = 0
    call: Call | None = None


# How often each operation occurs. Numbers can be negative in differences between two runs.
Operations = Counter[Operation]


class OperationRecorder(TorchDispatchMode):
    """Records every operation inside its context.

    known: tensors whose storages are not counted as live.

    The size of some results depends on values, which do not exist under `FakeTensorMode`. There,
    `nonzero` and `unique` return as many elements as their input has, and indexing with a mask
    selects half of the elements, so that a loop that runs until nothing is selected ends.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0
        self.operations: Operations = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sized = _SIZED_BY_VALUES.get(func._overloadpacket)
        if _has_mask(func, args):
            sized = _selected
        waits = sized is not None
        allocate = sized or _ONLY_ON_CUDA.get(func._overloadpacket)
        if allocate is not None and isinstance(args[0], FakeTensor):
            out = allocate(*args)
        else:
            out = func(*args, **kwargs)
        outputs = _tensors(out)
        if launches := _launches(func, args, outputs):
            self.operations[_operation(func, args, kwargs, out, launches, waits=waits)] += 1
        for tensor in outputs:
            self._track(tensor)
        return out

    def reset(self) -> None:
        """Clear the operations and restart the peak at the bytes that are live now."""
        self.operations, self.peak = Counter(), self.live

    def _track(self, tensor: Tensor) -> None:
        # Count storages, not tensors: a storage is live until the last of its views is freed.
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._live:
            return
        self._live[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        del self._live[key]
        self.live -= size


class HostReads(TorchFunctionMode):
    """Records when the host reads fake tensors, and returns values with which every check passes.

    A bool is true, unless it is a result of `isnan`. A float is 1. An integer is 0, which is a
    valid label; but if it counts the values above a bound, it is the number of all values. If the
    ranks exchange a list of integers, the host reads its own integers for every rank. Reading
    several elements of a tensor is one wait. Tensors that `torch.tensor` creates without a device
    or on "cpu", such as the step counts of torch's AdamW, are on the host also in a run on a GPU,
    so reading them is not a wait.
    """

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._sent: list[int] = []
        self._nans: Any = None  # the storage of the last result of `isnan`
        self._above: Any = None  # the storage of the last result of `>`
        self._num_above: tuple[Any, int] = (None, 0)  # the storage of its sum, and its elements
        self._last: Any = None  # the storage that was read last
        self._on_host: dict[int, Any] = {}  # storages by `_cdata`

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.tensor and isinstance(args[0], list) and len(args[0]) > 1:
            self._sent = args[0]
        if func in _READS and isinstance(args[0], FakeTensor):
            return _READS[func](self._read(args[0]))
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return 0
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            # The trainer reads labels in this way only if they are on the host: no wait.
            return np.zeros(args[0].shape, np.int64)
        out = func(*args, **(kwargs or {}))
        # The trainer passes the device of its rank, a `torch.device`.
        if func is torch.tensor and (kwargs or {}).get("device") in (None, "cpu"):
            self._on_host[out.untyped_storage()._cdata] = out.untyped_storage()
        if func in (torch.isnan, Tensor.isnan):
            self._nans = out.untyped_storage()
        elif func is Tensor.gt:
            self._above = out.untyped_storage()
        elif func is Tensor.sum and _same(args[0].untyped_storage(), self._above):
            self._num_above = out.untyped_storage(), args[0].numel()
        return out

    def _read(self, tensor: Tensor) -> int | float:
        storage = tensor.untyped_storage()
        if not _same(storage, self._last) and storage._cdata not in self._on_host:
            self._recorder.operations[Operation(bytes=tensor.itemsize, launches=0, waits=1)] += 1
        self._last = storage
        if tensor.dtype == torch.bool:
            return not _same(storage, self._nans)
        if tensor.is_floating_point():
            return 1.0
        if _same(storage, self._num_above[0]):
            return self._num_above[1]
        exchanged = self._sent and storage.nbytes() // tensor.itemsize % len(self._sent) == 0
        return self._sent[tensor.storage_offset() % len(self._sent)] if exchanged else 0


def _same(storage: Any, other: Any) -> bool:
    return other is not None and bool(storage._cdata == other._cdata)


_READS: dict[Any, Any] = {
    Tensor.item: lambda number: number,
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
}


def _nonzero(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.ndim), dtype=torch.int64)


def _unique(values: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    index = values.new_empty(values.numel(), dtype=torch.int64)
    return values.new_empty(values.numel()), index, torch.empty_like(index)


def _selected(tensor: Tensor, index: Any) -> Tensor:
    mask = next(each for each in index if each is not None)
    return tensor.new_empty((mask.numel() // 2, *tensor.shape[mask.ndim :]))


_SIZED_BY_VALUES: dict[Any, Any] = {
    aten.nonzero: _nonzero,
    aten._unique2: _unique,
    aten.repeat_interleave: lambda repeats, *_: torch.empty_like(repeats),
}


def _channel_moments(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    moment = x.new_empty(x.shape[1], dtype=torch.float32)
    return moment, torch.empty_like(moment)


def _channel_sums(grad: Tensor, x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(mean), torch.empty_like(mean), x.new_empty(0), x.new_empty(0)


# Operations that have no kernel on CPUs, and therefore none on fake CPU tensors.
_ONLY_ON_CUDA: dict[Any, Any] = {
    aten.batch_norm_update_stats: _channel_moments,
    aten.batch_norm_backward_reduce: _channel_sums,
    aten.batch_norm_backward_elemt: lambda grad, x, *_: torch.empty_like(x),
}


def _has_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the operation indexes with a mask, which makes the host wait for the number of
    selected elements."""
    if func._overloadpacket not in (aten.index, aten.index_put_):
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _launches(func: Any, args: Any, outputs: list[Tensor]) -> int:
    """Return the number of kernels: 0 for views and allocations, and 1 for most operations."""
    packet = func._overloadpacket
    if func.namespace in ("fsdp", "kway"):
        return 1  # some return nothing
    if func.namespace not in ("aten", "c10d") or packet in _WITHOUT_KERNEL:
        return 0
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return 0  # a view
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        lists = [each for each in args if isinstance(each, list | tuple) and _tensors(each)]
        chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
        return max(-(-chunks // _CHUNKS), -(-len(lists[0]) // _TENSORS[min(len(lists), 5)]))
    return int(any(tensor.numel() for tensor in outputs))


def _operation(
    func: Any, args: Any, kwargs: dict[str, Any], out: Any, launches: int, *, waits: bool
) -> Operation:
    if func.namespace == "c10d":  # `traffic.py` computes the bytes of collectives
        return Operation(launches=launches)
    inputs = _tensors((args, kwargs))
    return Operation(
        flops=_flops(func, args, kwargs, out),
        bytes=_moved(func, args, kwargs, out),
        products=_products(func, inputs),
        launches=launches,
        waits=int(waits),
        call=Call(func, _shapes(args), tuple((key, _shapes(kwargs[key])) for key in kwargs)),
    )


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return TensorShape(tuple(tree.shape), tree.stride(), tree.dtype)
    return tuple(map(_shapes, tree)) if isinstance(tree, list | tuple) else tree


def _moved(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    packet = func._overloadpacket
    read = _bytes((args, {key: value for key, value in kwargs.items() if key != "out"}))
    written = _bytes(out)
    if packet in _SELECTING:
        return read - _bytes(args[0]) + 2 * written
    if packet in _CHANGING_PARTS:
        return 2 * (read - _bytes(args[0]))
    if packet in _OVERWRITING:
        return read - _bytes(args[0]) + written
    if packet in _EMBEDDING_BAGS:
        rows, index = args[:2]
        return _bytes(args[1:]) + index.numel() * rows.shape[1] * rows.itemsize + _bytes(out[0])
    return read + written


def _bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(tree))


def _products(func: Any, inputs: list[Tensor]) -> Products:
    if any(tensor.itemsize == 2 for tensor in inputs):
        return "half"
    return "convolution" if func._overloadpacket in _CONVOLUTIONS else "single"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if func in (write_statistics, write_gradient):  # the logits of a block
        features, rows = args[:2]
        return 2 * features.numel() * len(rows)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args[0], args[1], products=2)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1], args[2], products=5)
    count = flop_registry.get(aten.addmm if packet is aten.addmm_ else packet)
    # The formulas do not accept the `out_dtype` of mm and addmm.
    args = [each for each in args if not isinstance(each, torch.dtype)]
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _attention_flops(query: Tensor, key: Tensor, *, products: int) -> int:
    """Return the FLOPs of attention as `products` matrix products of [B, H, T, S] x d.

    Forward has two; backward has five, because it recomputes the scores.
    """
    return 2 * products * query.numel() * key.shape[-2]

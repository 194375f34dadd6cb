"""Finds the operations for which the host would have to wait if the tensors were on a GPU.

The tests have no GPU. They run the code for GPUs on the CPU and record each operation that would
copy data between the host and the device, or whose result has a shape that depends on data.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROOT = str(Path(__file__).parents[1])
_aten = torch.ops.aten
# Operations that return a Python number, or a tensor whose shape depends on data.
_READS = {
    _aten._local_scalar_dense,  # item, float, int, bool, `if tensor`
    _aten.allclose,
    _aten.argwhere,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.nonzero,
    _aten.nonzero_numpy,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten.unique_dim_consecutive,
    _aten._unique,
    _aten._unique2,
}
# Operations that index with masks, which they convert to positions.
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# Calls that do nothing on the CPU, or that read memory without an operation. On CUDA, they copy.
_COPIES: list[tuple[Any, str]] = [
    *((torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__", "__dlpack__")),
    *((torch, name) for name in ("as_tensor", "asarray", "from_numpy", "tensor")),
    (torch.Tensor, "new_tensor"),
]


@contextmanager
def host_reads(host_tensors: Iterable[Tensor] = ()) -> Iterator[list[str]]:
    """Yield a list to which each operation for which the host would wait adds a line. This includes
    operations in the backward pass, which runs in the same thread on CPUs. Code that reads tensors
    only on CPUs takes the path for GPUs.

    `host_tensors` remain on the host even if there is a GPU. Reading them is free.
    """
    found: list[str] = []
    host = {tensor.untyped_storage().data_ptr() for tensor in host_tensors}

    def record(name: str, arguments: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if not tensors or any(t.untyped_storage().data_ptr() not in host for t in tensors):
            found.append(f"{name} at {_caller()}")

    # A TorchFunctionMode would miss calls in the backward pass.
    with pytest.MonkeyPatch.context() as patches, _Operations(record):
        for owner, name in _COPIES:
            patches.setattr(owner, name, _recorded(getattr(owner, name), name, record))
        patches.setattr("heads.topk.reading_is_free", lambda tensor: False)
        yield found


def _recorded(call: Any, name: str, record: Callable[[str, Any], None]) -> Any:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        record(name, args)
        return call(*args, **kwargs)

    return recorded


class _Operations(TorchDispatchMode):
    def __init__(self, record: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self._record(str(func), args)
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in _INDEXING:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if packet is _aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in _READS


def _caller() -> str:
    """Return the innermost line of this repository that is running, outside this file."""
    for frame in reversed(traceback.extract_stack()):
        inside = frame.filename.startswith(_ROOT) and "site-packages" not in frame.filename
        if inside and frame.filename != __file__:
            return f"{frame.filename.removeprefix(_ROOT + '/')}:{frame.lineno}"
    return "?"

"""Records the live bytes of torch operations as they run, and the work of each operation.

Under `FakeTensorMode` nothing is computed or allocated, so models of any size can be recorded.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# The kind of an operation's products, which determines their rate. half: 16-bit inputs.
# convolution: a float32 convolution, which cuDNN computes in TF32 by default
# (`torch.backends.cudnn.allow_tf32`). single: any other float32 product, which uses TF32 only with
# `train.tf32`.
Products = Literal["half", "convolution", "single"]
_CONVOLUTIONS = (aten.convolution, aten._convolution, aten.convolution_backward)


@dataclass(frozen=True)
class Work:
    """The work of one operation.

    flops: floating-point operations of its matrix products. bytes: bytes read and written.
    """

    flops: int
    bytes: int
    products: Products


class OperationRecorder(TorchDispatchMode):
    """Records every operation inside its context.

    known: tensors whose storages are not counted as live. temporaries: maps an operation to the
    number of float32 copies of its first tensor that it allocates while it runs.
    """

    def __init__(
        self, known: Iterable[Tensor] = (), temporaries: Mapping[Any, int] | None = None
    ) -> None:
        super().__init__()
        self._temporaries = temporaries or {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0
        self.work: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        self._record(func, args, kwargs, out, outputs)
        for tensor in outputs:
            self._track(tensor)
        if copies := self._temporaries.get(func._overloadpacket):
            self.peak = max(self.peak, self.live + copies * 4 * args[0].numel())
        return out

    def reset(self) -> None:
        """Clear the work and restart the peak at the bytes that are live now."""
        self.work, self.peak = [], self.live

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        if any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ):
            return  # a view
        inputs = _tensors((args, kwargs))
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs))
        products = _products(func, inputs)
        self.work.append(Work(_flops(func, args, kwargs, out), moved, products))

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


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _products(func: Any, inputs: list[Tensor]) -> Products:
    if any(tensor.itemsize == 2 for tensor in inputs):
        return "half"
    return "convolution" if func._overloadpacket in _CONVOLUTIONS else "single"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args[0], args[1], products=2)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1], args[2], products=5)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _attention_flops(query: Tensor, key: Tensor, *, products: int) -> int:
    """Return the FLOPs of attention as `products` matrix products of [B, H, T, S] x d.

    Forward has two; backward has five, because it recomputes the scores.
    """
    return 2 * products * query.numel() * key.shape[-2]

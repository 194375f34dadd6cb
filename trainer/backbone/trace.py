"""The work and the memory of a backbone, recorded from a pass over tensors without memory.

The real encoder runs under torch's `FakeTensorMode`, so no code here depends on the architecture
and a model of any size takes a second. `kway plan` needs a training step, and the MFU of a run the
products of a forward pass.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers.initialization import no_init_weights

from data.images.config import ImageConfig
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.config import BackboneOptions

aten = torch.ops.aten

# The kind of an operation, which determines its rate. half: products of 16-bit numbers.
# convolution: float32 convolutions, which cuDNN computes in TF32 by default. single: other float32
# products. normalization: batch norm, whose kernels read their input more than once. other: an
# operation without products.
Kind = Literal["half", "convolution", "single", "normalization", "other"]
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
_NORMALIZATIONS = (aten.native_batch_norm, aten.native_batch_norm_backward)
# Operations that only allocate or describe a tensor, in addition to views.
_WITHOUT_KERNEL = (
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten._unsafe_view),
    *(aten.new_empty, aten.new_empty_strided, aten.scalar_tensor, aten.lift_fresh),
)
# These do not read the tensor that they write.
_OVERWRITING = (aten.copy_, aten.fill_, aten.zero_)
# torch's formulas do not cover the attention kernels of CPUs. Backward has five products, because
# it computes the scores again.
_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5),
}
# Autocast runs these in float32 on CUDA, but in 16-bit precision on CPUs.
_IN_FLOAT32 = (F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.layer_norm)


class Work(NamedTuple):
    """One operation: the floating-point operations of its products, and the bytes that it reads
    and writes if each tensor moves once."""

    kind: Kind
    flops: int
    bytes: int


class Recorder(TorchDispatchMode):
    """Records the work of every operation inside its context, and the bytes of live tensors.

    known: tensors that are not counted as live.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0
        self.work: Counter[Work] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        out = func(*args, **kwargs)
        if func.namespace == "aten" and not func.is_view and packet not in _WITHOUT_KERNEL:
            self.work[_work(packet, args, kwargs, out)] += 1
        for tensor in _tensors(out):
            self._track(tensor)
        return out

    def reset(self) -> None:
        """Clear the work, and restart the peak at the bytes that are live now."""
        self.work, self.peak = Counter(), self.live

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


def _work(packet: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Work:
    inputs = _tensors((args, kwargs))
    written = num_bytes(_tensors(out))
    moved = num_bytes(inputs) + written
    if packet in _OVERWRITING:
        moved -= num_bytes(inputs[:1])
    elif packet is aten.embedding:
        moved = 2 * written  # it reads the selected rows only
    if packet in _CPU_ATTENTION:
        first, products = _CPU_ATTENTION[packet]
        flops = 2 * products * args[first].numel() * args[first + 1].shape[-2]
    else:
        count = flop_registry.get(packet)
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return Work(_kind(packet, inputs, flops), flops, moved)


def _kind(packet: Any, inputs: list[Tensor], flops: int) -> Kind:
    if packet in _NORMALIZATIONS:
        return "normalization"
    if not flops:
        return "other"
    if any(tensor.itemsize == 2 for tensor in inputs):
        return "half"
    return "convolution" if packet in _CONVOLUTIONS else "single"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class FakeBackbone:
    """A backbone in training mode whose tensors have no memory. Use it inside `mode`."""

    def __init__(self, config: BackboneOptions, image: ImageConfig | None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode, no_init_weights():  # fake tensors do not support all initializations
            self.backbone: Backbone = build_backbone(config.without_weights(), image=image).train()

    def forward_flops(self, inputs: dict[str, Tensor], *, rows: int) -> int:
        """Return the floating-point operations of a forward pass over `rows` rows that are shaped
        like those of `inputs`, each [b, ...].

        Raises RuntimeError if the encoder depends on the values of its inputs.
        """
        with self.mode, torch.no_grad(), Recorder() as recorder:
            self.backbone(
                {
                    name: torch.ones(rows, *tensor.shape[1:], dtype=tensor.dtype)
                    for name, tensor in inputs.items()
                }
            )
        return sum(each.flops * number for each, number in recorder.work.items())


def apply_cuda_rules(module: nn.Module, *, autocast: bool) -> None:
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

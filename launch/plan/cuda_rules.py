"""What torch does otherwise on CUDA than on the CPU that a plan is made on, for `network.py`."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Of CUDA's autocast list: these the CPU's leaves in 16 bits.
_IN_FLOAT32 = (F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.layer_norm)


class CudaRules(TorchFunctionMode):
    """Dropout keeps a mask of one byte a number, attention keeps no probabilities, and under
    autocast norms and softmax are computed in float32."""

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


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    del inplace
    if not training or p == 0:
        return input
    out: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return out

"""The element types that a checkpoint holds, by their names in safetensors files."""

import torch

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def stored_name(name: str, dtype: torch.dtype) -> str:
    """The name of the type of tensor `name`. Raises ValueError for a type that has none."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"tensor {name} is {dtype}, which a checkpoint does not hold: give it one of "
            + ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        )
    return _DTYPES[dtype]

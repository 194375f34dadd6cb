"""The columns of a safetensors file, written without a copy in memory, and mapped page by page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_DTYPES: dict[str, type[np.generic]] = {
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "U64": np.uint64,
    "F32": np.float32,
    "F64": np.float64,
}
_NAMES = {kind: name for name, kind in _DTYPES.items()}
_MAX_HEADER = 1 << 20


def write_columns(file: IO[bytes], columns: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays of any shape in the safetensors format.

    The safetensors library writes a file of its own, which only its owner can read, and reports a
    full disk with an error of its own.
    """
    ordered = sorted(columns.items(), key=lambda one: (-one[1].itemsize, one[0]))
    header, end = {}, 0
    for name, column in ordered:
        start, end = end, end + column.nbytes
        about = {"dtype": _NAMES[column.dtype.type], "shape": list(column.shape)}
        header[name] = {**about, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, column in ordered:
        file.write(np.ascontiguousarray(column).data)


def mapped_columns(path: Path, types: Mapping[str, type[np.generic]]) -> dict[str, NDArray[Any]]:
    """Return the one-dimensional arrays of the file `path`, read-only, by name.

    The safetensors library copies arrays unless torch loads them. Raises ValueError if the file is
    damaged or contains an array whose name or type is not in `types`.
    """
    try:
        content = np.memmap(path, np.uint8, "r")
        start = 8 + int(content[:8].view("<u8")[0])
        if not 8 < start <= min(_MAX_HEADER, len(content)):
            raise ValueError("its header is damaged")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        columns = {}
        for name, about in header.items():
            dtype, (first, last) = _DTYPES[about["dtype"]], about["data_offsets"]
            size = int(np.prod(about["shape"], dtype=object)) * np.dtype(dtype).itemsize
            if types[name] is not dtype or not 0 <= first <= last <= len(content) - start:
                raise ValueError(f"array {name} has another type, or is not complete")
            if len(about["shape"]) != 1 or size != last - first:
                raise ValueError(f"array {name} has another shape")
            columns[name] = np.asarray(content[start + first : start + last]).view(dtype)
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    ) as error:
        raise ValueError(f"{path} is damaged ({error}): copy it again") from error
    return columns

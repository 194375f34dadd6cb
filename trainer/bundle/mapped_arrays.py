"""Arrays of a safetensors file as read-only memory maps: opened at once, paged in where looked at.

For tables that are looked up at few places. Replicas on one machine share the pages. Rows of class
weights are read otherwise (`trainer/bundle/row_file.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

# By name: type, and shape with None where any length will do.
Shapes = Mapping[str, tuple[type[np.generic], tuple[int | None, ...]]]


def mapped_arrays(
    path: Path, expected: Shapes, *, optional: Shapes | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the file `path`: all `expected` ones, and no others except `optional` ones.

    Raises ValueError if they differ or the file is damaged.
    """
    try:
        # torch's loader maps the file and copies nothing, which numpy's does.
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy the bundle again") from error
    found = {name: (array.dtype.type, array.shape) for name, array in arrays.items()}
    known = {**expected, **(optional or {})}
    if not expected.keys() <= found.keys() <= known.keys() or not all(
        kind is known[name][0] and _fits(shape, known[name][1])
        for name, (kind, shape) in found.items()
    ):
        shapes = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in sorted(found.items()))
        raise ValueError(
            f"{path} does not fit bundle.json: it holds {shapes}; copy the bundle again"
        )
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == has for has, size in zip(shape, wanted, strict=True)
    )

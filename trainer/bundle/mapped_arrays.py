"""Arrays of a safetensors file as read-only memory maps, which open immediately and load pages on
access.

Use this for tables that are read rarely. Replicas on one machine share the pages. Class weights are
read differently (`trainer/bundle/row_file.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

# The dtype and shape of each array by name. None in a shape allows any length.
Shapes = Mapping[str, tuple[type[np.generic], tuple[int | None, ...]]]


def mapped_arrays(
    path: Path, expected: Shapes, *, optional: Shapes | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the file `path`: all `expected` arrays, and those `optional` arrays that
    the file contains.

    Raises ValueError if the file contains other arrays or is damaged.
    """
    try:
        # The torch loader maps the file without a copy; the numpy loader copies it.
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy the bundle again") from error
    found = {name: (array.dtype.type, array.shape) for name, array in arrays.items()}
    known = {**expected, **(optional or {})}
    if not expected.keys() <= found.keys() <= known.keys() or not all(
        kind is known[name][0]
        and len(shape) == len(known[name][1])
        and all(size in (None, own) for own, size in zip(shape, known[name][1], strict=True))
        for name, (kind, shape) in found.items()
    ):
        shapes = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in sorted(found.items()))
        raise ValueError(
            f"{path} does not match bundle.json: it contains {shapes}; copy the bundle again"
        )
    for array in arrays.values():
        array.setflags(write=False)
    return arrays

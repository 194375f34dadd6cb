"""Values of a record: JSON, in which floating-point numbers are compared with a tolerance.

Exact values (bytes, sample numbers, exit codes) are recorded unchanged or as digests. Results of
floating-point operations differ in their last bits between processors, so they are recorded as
numbers with a relative tolerance.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, dict[str, Any]]


def exact(value: Any) -> dict[str, Any]:
    """Return an entry whose numbers must be equal."""
    return {"value": value}


def near(value: Any, tolerance: float) -> dict[str, Any]:
    """Return an entry whose floats may differ by `tolerance`, relative to their own size or, in a
    list of floats, to the largest of them."""
    return {"value": value, "tolerance": tolerance}


def digest(*contents: bytes | Path) -> str:
    """Return a short SHA-256 of bytes or of the contents of files."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content.read_bytes() if isinstance(content, Path) else content)
    return found.hexdigest()[:16]


def summary(numbers: np.ndarray) -> list[float]:
    """Return the norm of an array and its projection on a fixed random vector.

    Almost any change of a number or of the order of the numbers changes the projection.
    """
    flat = numbers.astype(np.float64).ravel()
    direction = np.random.default_rng(flat.size).standard_normal(flat.size)
    return [float(np.linalg.norm(flat)), float(direction @ flat)]


def write(path: Path, record: Record) -> None:
    """Write one entry per line, so that version control shows which ones change."""
    entries = [
        f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"
        for key, entry in sorted(record.items())
    ]
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def differences(recorded: Record, found: Record, *, bits: bool) -> Iterator[tuple[str, str]]:
    """Yield each key whose entries differ, with a description. With `bits`, floats must be equal
    too."""
    for key in sorted(recorded.keys() | found.keys()):
        if key not in found:
            yield key, "is missing"
        elif key not in recorded:
            yield key, f"is new: {_short(found[key]['value'])}"
        else:
            tolerance = 0 if bits else recorded[key].get("tolerance", 0)
            was, now = recorded[key]["value"], found[key]["value"]
            for path, one, other in _unequal(was, now, tolerance):
                yield key, f"{path or 'was'} {_short(one)}, now {_short(other)}"


def _unequal(
    was: Any, now: Any, tolerance: float, path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of each difference between two JSON values. A member that is
    new and null is no difference."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in sorted(was.keys() ^ now.keys()):
            if name in was or now[name] is not None:
                yield f"{path}.{name}", was.get(name, "missing"), now.get(name, "missing")
        for name in sorted(was.keys() & now.keys()):
            yield from _unequal(was[name], now[name], tolerance, f"{path}.{name}")
    elif _is_numbers(was) and _is_numbers(now) and len(was) == len(now):
        scale = max((abs(number) for number in [*was, *now] if math.isfinite(number)), default=0)
        if not all(
            _is_close(one, other, tolerance, scale) for one, other in zip(was, now, strict=True)
        ):
            yield path, was, now
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _unequal(one, other, tolerance, f"{path}[{index}]")
    elif isinstance(was, float) and isinstance(now, float):
        if not _is_close(was, now, tolerance, max(abs(was), abs(now))):
            yield path, was, now
    elif type(was) is not type(now) or was != now:
        yield path, was, now


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is float for each in value)


def _is_close(one: float, other: float, tolerance: float, scale: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    # The last term is for numbers that are zero except for rounding.
    return one == other or abs(one - other) <= tolerance * scale + tolerance * 1e-3


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return (
        text
        if len(text) <= 120
        else f"{text[:80]}… ({len(text)} characters, {digest(text.encode())})"
    )

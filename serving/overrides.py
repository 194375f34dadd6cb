"""Thresholds that the operator of a server sets instead of those of the bundle, in a CSV file:

class,threshold
husky,2.5
#17,0.8
"""

import csv
import io
import math
from pathlib import Path

from trainer.bundle.bundle import Bundle

_COLUMNS = ["class", "threshold"]
_MAX_BYTES = 256 * 2**20


def read_overrides(file: Path, bundle: Bundle) -> dict[int, float]:
    """Return the thresholds in `file` by class id.

    Raises OSError or ValueError, with the line, if the file cannot be read, a class is unknown or
    occurs twice, or a threshold is not a finite number.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OSError(
            f"thresholds {file} cannot be read ({error.strerror}). Pass a CSV file"
        ) from error
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"thresholds {file} are larger than {_MAX_BYTES} bytes. Check the path")
    try:
        rows = csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True)
        if next(rows, []) != _COLUMNS:
            raise ValueError(f"the first line is not {','.join(_COLUMNS)}")
        found: dict[int, float] = {}
        for row in rows:
            if row:
                try:
                    class_id, threshold = _parsed(row, bundle)
                except ValueError as error:
                    raise ValueError(f"line {rows.line_num}: {error}") from error
                if class_id in found:
                    raise ValueError(f"line {rows.line_num}: class {row[0]!r} occurs twice")
                found[class_id] = threshold
    except (ValueError, csv.Error) as error:
        raise ValueError(f"thresholds {file}: {error}") from error
    return found


def _parsed(row: list[str], bundle: Bundle) -> tuple[int, float]:
    if len(row) != len(_COLUMNS):
        raise ValueError(f"{len(row)} columns instead of {len(_COLUMNS)}")
    threshold = float(row[1])
    if not math.isfinite(threshold):
        raise ValueError(f"threshold {row[1]} is not a finite number")
    return bundle.class_id(row[0]), threshold

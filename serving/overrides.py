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


def read_overrides(file: Path, bundle: Bundle) -> dict[int, float]:
    """Return the thresholds in `file` by class id.

    Raises OSError or ValueError, with the line, if the file cannot be read, a class is unknown or
    occurs twice, or a threshold is not a finite number.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise OSError(
            f"thresholds {file} cannot be read ({error.strerror}). Pass a CSV file"
        ) from error
    try:
        rows = csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True)
        if next(rows, []) != _COLUMNS:
            raise ValueError(f"the first line is not {','.join(_COLUMNS)}")
        found: dict[int, float] = {}
        for row in filter(None, rows):
            try:
                if len(row) != len(_COLUMNS):
                    raise ValueError(f"{len(row)} columns instead of {len(_COLUMNS)}")
                name, threshold = row
                class_id = bundle.classes.id_of(name)
                if class_id in found:
                    raise ValueError(f"class {name!r} occurs twice")
                found[class_id] = float(threshold)
                if not math.isfinite(found[class_id]):
                    raise ValueError(f"threshold {threshold} is not a finite number")
            except ValueError as error:
                raise ValueError(f"line {rows.line_num}: {error}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"thresholds {file}: {error}") from error
    return found

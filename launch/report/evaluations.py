"""Evaluations of a run: the measures of each, and of the newest what there is of each class."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from launch.report.steps import as_number


@dataclass(frozen=True)
class Classes:
    """Of C classes with samples: `average_precision` [C], `precision_at` [C, R] at `recalls`."""

    step: int
    average_precision: np.ndarray
    precision_at: np.ndarray
    recalls: tuple[float, ...]
    num_classes: int


@dataclass(frozen=True)
class Evaluations:
    """`measures` by step, in order of steps; `troubles` name the files that could not be read."""

    measures: dict[int, dict[str, float]]
    classes: Classes | None
    troubles: tuple[str, ...]


def read_evaluations(folder: Path) -> Evaluations:
    """Those in a run's folder of evaluations; none where there is no folder."""
    measures: dict[int, dict[str, float]] = {}
    troubles = []
    for path in sorted(folder.glob("step-*.json")):
        try:
            step, numbers = _read_measures(path)
            measures[step] = numbers
        except (OSError, ValueError, RecursionError) as error:
            troubles.append(f"{path.name} is left out: {error}")
    classes = None
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True):
        try:
            classes = _read_classes(path)
            break
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            troubles.append(f"{path.name} is left out: {error}")
    return Evaluations(dict(sorted(measures.items())), classes, tuple(troubles))


def _read_measures(path: Path) -> tuple[int, dict[str, float]]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it names no step")
    return record["step"], dict(_measures(record))


def _measures(record: dict[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        number = as_number(value)
        if name not in ("step", "samples") and number is not None and np.isfinite(number):
            yield name, number


def _read_classes(path: Path) -> Classes:
    tensors = load_file(path)
    positives, average = tensors["positives"], tensors["average_precision"]
    precision, recalls = tensors["precision_at"], tensors["recalls"]
    if not (positives.shape == average.shape == precision.shape[:1] and positives.ndim == 1):
        raise ValueError("its tensors have lengths that differ")
    if precision.shape != (len(positives), *recalls.shape) or recalls.ndim != 1:
        raise ValueError("its precisions and recalls do not fit")
    present = positives > 0
    return Classes(
        step=int(path.stem.removeprefix("step-")),
        average_precision=average[present].astype(np.float64),
        precision_at=precision[present].astype(np.float64),
        recalls=tuple(recalls.astype(np.float64).tolist()),
        num_classes=len(positives),
    )

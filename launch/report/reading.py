"""Reads the folder of a run in any state: running, interrupted, damaged or empty."""

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import yaml

from data.messages import pluralize
from data.remote.config import is_url
from data.shards.mixture import load_manifest
from trainer.evaluation import Evaluation, load_evaluation
from trainer.evaluation.saved import ClassTable
from trainer.run.folder import RunFolder, flat_settings


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of a run's folder.

    columns: the logged steps as float64 columns [n] by name (`loss`, `phases.data`), NaN where
    missing. measures: metrics by step, in ascending order. classes: the per-class results of the
    newest intact evaluation. recipe: settings by dotted key. problems: one line for each unreadable
    file.
    """

    number: int
    name: str
    columns: dict[str, np.ndarray]
    measures: dict[int, dict[str, float]]
    classes: ClassTable | None
    recipe: dict[str, str]
    is_running: bool
    problems: Sequence[str]

    @property
    def letter(self) -> str:
        return ascii_uppercase[self.number]

    def column(self, name: str) -> np.ndarray:
        return self.columns.get(name, np.full(len(self.columns["step"]), np.nan))

    @cached_property
    def seconds(self) -> np.ndarray:
        """Cumulative seconds spent in steps, without evaluations and checkpoints, at each logged
        step; all NaN if no time was recorded."""
        spent = np.diff(self.column("step"), prepend=0) * self.column("step_seconds")
        return np.where(np.isfinite(spent).any(), np.cumsum(np.nan_to_num(spent)), np.nan)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in `folders`, and assign them the letters A, B and so on.

    Raises FileNotFoundError for a missing folder, and ValueError for a folder that is not a run and
    for too many folders.
    """
    if len(folders) > len(ascii_uppercase):
        raise ValueError(f"{len(folders)} runs are too many: pass at most {len(ascii_uppercase)}")
    return [_read_run(number, folder) for number, folder in enumerate(folders)]


def _read_run(number: int, folder: Path) -> Run:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: pass the folder that the recipe's `run` specifies"
        )
    run, metrics = RunFolder(folder), folder / "metrics.jsonl"
    if not (run.recipe.exists() or metrics.exists() or run.evaluations.exists()):
        raise ValueError(
            f"{folder} is not a run: it contains neither {run.recipe.name} nor {metrics.name}"
        )
    problems: list[str] = []
    recipe = dict[str, str]()
    try:
        settings = flat_settings(yaml.safe_load(run.recipe.read_text(encoding="utf-8")))
        recipe = {k: "null" if v is None else str(v) for k, v in settings.items()}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{run.recipe.name} cannot be read: {error}")
    columns, unreadable = _read_metrics(metrics)
    if unreadable:
        lines = pluralize(unreadable, "line")
        problems.append(f"{metrics.name}: skipped {lines} without a valid record")
    if not len(columns["step"]):
        problems.append("no steps are logged")
    measures: dict[int, dict[str, float]] = {}
    for path in sorted(run.evaluations.glob("step-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            measures[record["step"]] = {
                name: number
                for name, number in _numbers(record)
                if name not in ("step", "samples") and np.isfinite(number)
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            problems.append(f"{path.name} is skipped: {error!r}")
    classes = None
    for step in sorted(measures, reverse=True):
        try:
            classes = _class_table(run, load_evaluation(run.evaluations, step=step))
            break
        except (OSError, ValueError) as error:
            problems.append(str(error))
    found = (columns, measures, classes, recipe, run.is_locked(), problems)
    return Run(number, str(folder), *found)


def _read_metrics(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Read the logged steps as columns, and count the invalid lines.

    The last line of a killed run may be truncated.
    """
    columns: dict[str, array[float]] = {"step": array("d")}
    unreadable = 0
    lines = path.open(encoding="utf-8", errors="replace") if path.is_file() else nullcontext(())
    with lines as file:
        for line in file:
            try:
                record = json.loads(line)
                event, numbers = record["event"], dict(_numbers(record))
                numbers["step"] = float(record["step"])
            except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
                unreadable += 1
                continue
            if event == "step":
                for name in numbers.keys() - columns.keys():
                    columns[name] = array("d", [np.nan]) * len(columns["step"])
                for name, column in columns.items():
                    column.append(numbers.get(name, np.nan))
    return {name: np.array(values) for name, values in columns.items()}, unreadable


def _numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record. The names of nested ones contain a dot: `phases.data`."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value) if abs(value) < 1e300 else np.nan


def _class_table(run: RunFolder, evaluation: Evaluation) -> ClassTable:
    """Return the per-class results. Classes are numbered if their names cannot be read here."""
    with suppress(OSError, ValueError):
        data = run.load_recipe().data
        if not any(map(is_url, data.addresses)):  # do not wait for a remote store
            return ClassTable(evaluation, load_manifest(data).class_names)
    return ClassTable(evaluation, [f"class {j}" for j in range(len(evaluation.reached))])

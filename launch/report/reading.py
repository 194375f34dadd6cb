"""Reads a run's folder in any state: running, interrupted, damaged or empty."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file

from data.messages import pluralize
from launch.report.steps import Steps, as_number, read_steps
from trainer.run.folder import RunFolder

_MOST_RUNS = len(ascii_uppercase)
_MOST_RECIPE_BYTES, _MOST_RECIPE_KEYS = 1 << 20, 5_000


@dataclass(frozen=True)
class Classes:
    """Measures of the C classes with samples: `average_precision` [C], `precision_at` [C, R] for
    the R `recalls`."""

    step: int
    average_precision: np.ndarray
    precision_at: np.ndarray
    recalls: tuple[float, ...]
    num_classes: int


@dataclass(frozen=True)
class Evaluations:
    """`measures` by step, in ascending order. `troubles`: one line per unreadable file."""

    measures: dict[int, dict[str, float]]
    classes: Classes | None
    troubles: tuple[str, ...]


def read_evaluations(folder: Path) -> Evaluations:
    """Read a run's evaluations. The result is empty if the folder does not exist."""
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


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder. `troubles`: one line for each thing that is unreadable."""

    letter: str
    name: str
    steps: Steps
    evaluations: Evaluations
    recipe_text: str
    recipe: dict[str, str]
    is_running: bool
    troubles: tuple[str, ...]

    @property
    def number(self) -> int:
        """The index of the run, from 0, which determines its color and dashes."""
        return ascii_uppercase.index(self.letter)

    @property
    def last_step(self) -> int:
        """The last step with an event, evaluation or log record; 0 if there is none."""
        events = [event.step for event in self.steps.events]
        logged = self.steps.column("step")
        return max([0, *events, *self.evaluations.measures, *map(int, logged[-1:])])

    @property
    def state(self) -> str:
        """`running, at step 4`, `done`, `stopped at step 4 of 9` or `nothing logged`."""
        if self.is_running:
            return f"running, at step {self.last_step}"
        if not len(self.steps) and not self.evaluations.measures:
            return "nothing logged"
        planned = self.recipe.get("train.duration.steps", "null")
        if planned.isdecimal():
            whole = self.last_step >= int(planned)
            return "done" if whole else f"stopped at step {self.last_step} of {planned}"
        # The number of steps in an epoch is unknown here, but each run ends with an evaluation.
        whole = self.last_step in self.evaluations.measures
        return "done" if whole else f"stopped at step {self.last_step}"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in `folders` and letter them from A.

    Raises FileNotFoundError for a missing folder, and ValueError for a folder that is not a run,
    for duplicates and for too many folders.
    """
    if len(folders) > _MOST_RUNS:
        raise ValueError(f"{len(folders)} runs are more than a page shows: give {_MOST_RUNS}")
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    names = _names(folders)
    return [
        _read_run(folder, letter, name)
        for folder, letter, name in zip(folders, ascii_uppercase, names, strict=False)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths if two names are the same."""
    names = [folder.resolve().name for folder in folders]
    several = len(set(names)) < len(names)
    return [str(folder) for folder in folders] if several else names


def _read_run(folder: Path, letter: str, name: str) -> Run:
    run = RunFolder(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the folder that a recipe's run names")
    metrics = folder / "metrics.jsonl"
    if not (run.recipe.exists() or metrics.exists() or run.evaluations.exists()):
        raise ValueError(f"{folder} is not a run: it has no {run.recipe.name} or {metrics.name}")
    troubles: list[str] = []
    text, recipe = "", dict[str, str]()
    try:
        text, recipe = _read_recipe(run.recipe)
    except (OSError, ValueError) as error:
        troubles.append(f"its recipe cannot be shown: {error}")
    steps = read_steps(metrics)
    evaluations = read_evaluations(run.evaluations)
    if steps.unreadable:
        troubles.append(
            f"{metrics.name}: passed over {pluralize(steps.unreadable, 'line')} that are no records"
        )
    if not len(steps):
        troubles.append("no step is logged")
    troubles += evaluations.troubles
    is_running = _is_locked(folder / ".lock")
    return Run(letter, name, steps, evaluations, text, recipe, is_running, tuple(troubles))


def _read_recipe(path: Path) -> tuple[str, dict[str, str]]:
    """The text of a recipe, and its leaves as `optimizer.lr` -> `0.1`.

    Accepts any YAML, including recipes of older versions. Raises ValueError for anything else.
    """
    if path.stat().st_size > _MOST_RECIPE_BYTES:
        raise ValueError(f"{path.name} is larger than a recipe: {path.stat().st_size} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from error
    flat: dict[str, str] = {}
    for key, leaf in _leaves(tree, ""):
        if len(flat) == _MOST_RECIPE_KEYS:  # nested YAML aliases can expand exponentially
            raise ValueError(f"{path.name} has more than {_MOST_RECIPE_KEYS} keys")
        flat[key] = leaf
    return text, flat


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, "null" if tree is None else str(tree)


def _is_locked(path: Path) -> bool:
    """Whether a process on this machine is training in the folder.

    Reads /proc/locks, because trying to take the lock could make a trainer that starts fail.
    """
    locks = Path("/proc/locks")
    if not (path.exists() and locks.exists()):
        return False
    inode = str(path.stat().st_ino)
    held = (line.split() for line in locks.read_text().splitlines())
    return any("FLOCK" in words and words[-3].split(":")[-1] == inode for words in held)


def training_seconds(steps: Steps) -> float:
    """Seconds spent in the logged steps, without evaluations and checkpoints."""
    counts = np.diff(steps.column("step"), prepend=0)
    return float(np.nansum(counts * steps.column("step_seconds")))

"""Reads the folder of a run in any state: running, interrupted, damaged or empty."""

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

_MAX_RUNS = len(ascii_uppercase)
_MAX_RECIPE_BYTES, _MAX_RECIPE_KEYS = 1 << 20, 5_000


@dataclass(frozen=True)
class Classes:
    """Metrics of the C classes that have samples: `average_precision` [C], and `precision_at`
    [C, R] at the R `recalls`."""

    step: int
    average_precision: np.ndarray
    precision_at: np.ndarray
    recalls: tuple[float, ...]
    num_classes: int


@dataclass(frozen=True)
class Evaluations:
    """`measures`: metrics by step, in ascending order. `problems`: one line per unreadable file."""

    measures: dict[int, dict[str, float]]
    classes: Classes | None
    problems: tuple[str, ...]


def read_evaluations(folder: Path) -> Evaluations:
    """Read a run's evaluations. The result is empty if the folder does not exist."""
    measures: dict[int, dict[str, float]] = {}
    problems = []
    for path in sorted(folder.glob("step-*.json")):
        try:
            step, numbers = _read_measures(path)
            measures[step] = numbers
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.name} is skipped: {error}")
    classes = None
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True):
        try:
            classes = _read_classes(path)
            break
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            problems.append(f"{path.name} is skipped: {error}")
    return Evaluations(dict(sorted(measures.items())), classes, tuple(problems))


def _read_measures(path: Path) -> tuple[int, dict[str, float]]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it contains no step number")
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
        raise ValueError("the lengths of its tensors differ")
    if precision.shape != (len(positives), *recalls.shape) or recalls.ndim != 1:
        raise ValueError("the shapes of its tensors precision_at and recalls do not match")
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
    """The contents of a run's folder. `problems`: one line for each unreadable file or record."""

    letter: str
    name: str
    steps: Steps
    evaluations: Evaluations
    recipe_text: str
    recipe: dict[str, str]
    is_running: bool
    problems: tuple[str, ...]

    @property
    def number(self) -> int:
        """The index of the run, from 0, which determines its color and dashes."""
        return ascii_uppercase.index(self.letter)

    @property
    def last_step(self) -> int:
        """The last step that has an event, an evaluation or a log record; 0 if there is none."""
        events = [event.step for event in self.steps.events]
        logged = self.steps.column("step")
        return max([0, *events, *self.evaluations.measures, *map(int, logged[-1:])])

    @property
    def state(self) -> str:
        """`running at step 4`, `finished`, `stopped at step 4 of 9` or `no steps logged`."""
        if self.is_running:
            return f"running at step {self.last_step:,}"
        if not len(self.steps) and not self.evaluations.measures:
            return "no steps logged"
        planned = self.recipe.get("train.duration.steps", "null")
        if planned.isdecimal():
            is_finished, of_planned = self.last_step >= int(planned), f" of {int(planned):,}"
        else:
            # The number of steps per epoch is unknown here, but each run ends with an evaluation.
            is_finished, of_planned = self.last_step in self.evaluations.measures, ""
        return "finished" if is_finished else f"stopped at step {self.last_step:,}{of_planned}"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in `folders`, and assign them the letters A, B and so on.

    Raises FileNotFoundError for a missing folder, and ValueError for a folder that is not a run,
    for duplicates and for too many folders.
    """
    if len(folders) > _MAX_RUNS:
        raise ValueError(f"{len(folders)} runs are too many: pass at most {_MAX_RUNS}")
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"{folder} is passed twice: pass each run once")
    names = _names(folders)
    return [
        _read_run(folder, letter, name)
        for folder, letter, name in zip(folders, ascii_uppercase, names, strict=False)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths if two names are identical."""
    names = [folder.resolve().name for folder in folders]
    several = len(set(names)) < len(names)
    return [str(folder) for folder in folders] if several else names


def _read_run(folder: Path, letter: str, name: str) -> Run:
    run = RunFolder(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: pass the folder that the recipe's `run` specifies"
        )
    metrics = folder / "metrics.jsonl"
    if not (run.recipe.exists() or metrics.exists() or run.evaluations.exists()):
        raise ValueError(
            f"{folder} is not a run: it contains neither {run.recipe.name} nor {metrics.name}"
        )
    problems: list[str] = []
    text, recipe = "", dict[str, str]()
    try:
        text, recipe = _read_recipe(run.recipe)
    except (OSError, ValueError) as error:
        problems.append(f"the recipe cannot be shown: {error}")
    steps = read_steps(metrics)
    evaluations = read_evaluations(run.evaluations)
    if steps.unreadable:
        problems.append(
            f"{metrics.name}: skipped {pluralize(steps.unreadable, 'line')} without a valid record"
        )
    if not len(steps):
        problems.append("no steps are logged")
    problems += evaluations.problems
    is_running = _is_locked(folder / ".lock")
    return Run(letter, name, steps, evaluations, text, recipe, is_running, tuple(problems))


def _read_recipe(path: Path) -> tuple[str, dict[str, str]]:
    """The text of a recipe, and its leaves by dotted path (`optimizer.lr` -> `0.1`).

    Accepts any YAML, including recipes of older versions. Raises ValueError for anything else.
    """
    if path.stat().st_size > _MAX_RECIPE_BYTES:
        raise ValueError(f"{path.name} is too large for a recipe: {path.stat().st_size:,} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from error
    flat: dict[str, str] = {}
    for key, leaf in _leaves(tree, ""):
        if len(flat) == _MAX_RECIPE_KEYS:  # nested YAML aliases can expand exponentially
            raise ValueError(f"{path.name} has more than {_MAX_RECIPE_KEYS:,} keys")
        flat[key] = leaf
    return text, flat


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, "null" if tree is None else str(tree)


def _is_locked(path: Path) -> bool:
    """Whether a process on this machine is writing to the folder.

    Reads /proc/locks, because trying to acquire the lock could make a starting trainer fail.
    """
    locks = Path("/proc/locks")
    if not (path.exists() and locks.exists()):
        return False
    inode = str(path.stat().st_ino)
    lines = (line.split() for line in locks.read_text().splitlines())
    return any("FLOCK" in words and words[-3].split(":")[-1] == inode for words in lines)


def training_seconds(steps: Steps) -> float:
    """Seconds spent in the logged steps, without evaluations and checkpoints."""
    counts = np.diff(steps.column("step"), prepend=0)
    return float(np.nansum(counts * steps.column("step_seconds")))

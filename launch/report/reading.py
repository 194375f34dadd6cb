"""Reads a run's folder, whatever state it is in: running, cut off, damaged, empty."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from launch.report.evaluations import Evaluations, read_evaluations
from launch.report.recipes import read_recipe
from launch.report.steps import Steps, read_steps
from launch.wording import counted
from trainer.run.folder import RunFolder

_MOST_RUNS = len(ascii_uppercase)


@dataclass(frozen=True)
class Run:
    """What a folder holds of a run; `troubles` say in a line each what could not be read."""

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
        """From 0: which colour and dashes are its own."""
        return ascii_uppercase.index(self.letter)

    @property
    def last_step(self) -> int:
        """The last that anything is known of; 0: nothing."""
        events = [event.step for event in self.steps.events]
        logged = self.steps.column("step")
        return max([0, *events, *self.evaluations.measures, *map(int, logged[-1:])])

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped at step 400 of 1000` or `nothing logged`."""
        if self.is_running:
            return f"running, at step {self.last_step}"
        if not len(self.steps) and not self.evaluations.measures:
            return "nothing logged"
        planned = self.recipe.get("train.duration.steps", "null")
        if planned.isdecimal():
            whole = self.last_step >= int(planned)
            return "done" if whole else f"stopped at step {self.last_step} of {planned}"
        # Of epochs the steps are not known here: the evaluation at the end tells.
        whole = self.last_step in self.evaluations.measures
        return "done" if whole else f"stopped at step {self.last_step}"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, lettered from A.

    Raises FileNotFoundError for a folder that is not there and ValueError for one that is no run,
    is given twice, or is one too many.
    """
    if len(folders) > _MOST_RUNS:
        raise ValueError(f"{len(folders)} runs are more than a page shows: give {_MOST_RUNS}")
    resolved = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, resolved, strict=True):
        if resolved.count(place) > 1:
            raise ValueError(f"{folder} is given twice")
    names = _names(folders)
    return [
        _read_run(folder, letter, name)
        for folder, letter, name in zip(folders, ascii_uppercase, names, strict=False)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their paths where two have the same."""
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
        text, recipe = read_recipe(run.recipe)
    except (OSError, ValueError) as error:
        troubles.append(f"its recipe cannot be shown: {error}")
    steps = read_steps(metrics)
    evaluations = read_evaluations(run.evaluations)
    if steps.unreadable:
        troubles.append(
            f"{metrics.name}: passed over {counted(steps.unreadable, 'line')} that are no records"
        )
    if not len(steps):
        troubles.append("no step is logged")
    troubles += evaluations.troubles
    is_running = _is_locked(folder / ".lock")
    return Run(letter, name, steps, evaluations, text, recipe, is_running, tuple(troubles))


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine trains there. To try the lock would get in its way."""
    locks = Path("/proc/locks")
    if not (path.exists() and locks.exists()):
        return False
    inode = str(path.stat().st_ino)
    held = (line.split() for line in locks.read_text().splitlines())
    return any("FLOCK" in words and words[-3].split(":")[-1] == inode for words in held)


def training_seconds(steps: Steps) -> float:
    """What the logged steps took, evaluations and checkpoints left out."""
    counts = np.diff(steps.column("step"), prepend=0)
    return float(np.nansum(counts * steps.column("step_seconds")))

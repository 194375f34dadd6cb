"""What an experiment is: the jobs that it asks for, and what it makes of their results."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.papers.budget import Budget
from benchmarks.papers.job import Job, Results
from benchmarks.papers.section import Picture, Section

# Yields jobs, gets their results, and returns the section: the experiment from top to bottom.
Course = Generator[Sequence[Job], Results, Section]


@dataclass(frozen=True)
class Album:
    """Where an experiment's pictures go."""

    folder: Path

    def add(self, name: str, figure: Figure, *, title: str, words: str) -> Picture:
        """Write `figure` as `name`.png."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"{name}.png"
        # No metadata: the same numbers give the same bytes.
        figure.savefig(self.folder / file, dpi=110, bbox_inches="tight", metadata={"Software": ""})
        return Picture(file, title, words)


@dataclass(frozen=True)
class Experiment:
    """`minutes` of an hour's budget for all are this one's; `full`: what the published sizes are,
    for which it may want a GPU. `course` runs it on what it `needs` below the user's data."""

    name: str
    paper: str
    title: str
    minutes: float
    full: str
    course: Callable[[Budget, Album], Course]
    wants_gpu: bool = False
    needs: tuple[str, ...] = ()

"""The definition of an experiment: the jobs that it requests and the section it writes."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.job import Job, Results
from experiments.papers.section import Plot, Section

# A generator that yields jobs, receives their results, and returns the section.
Procedure = Generator[Sequence[Job], Results, Section]


@dataclass(frozen=True)
class PlotFolder:
    """The output folder for the plots of an experiment."""

    folder: Path

    def save(self, name: str, figure: Figure, *, title: str, alt_text: str) -> Plot:
        """Write `figure` to `name`.png."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"{name}.png"
        # Without metadata, the same numbers produce the same bytes.
        figure.savefig(self.folder / file, dpi=110, bbox_inches="tight", metadata={"Software": ""})
        return Plot(file, title, alt_text)


@dataclass(frozen=True)
class Experiment:
    """One experiment of the catalog.

    `minutes` is the budget that it is designed for. `procedure` runs it; `gpu`: it trains a
    published network, which needs a GPU. `needs` lists the files that it requires in the `--data`
    folder.
    """

    name: str
    paper: str
    title: str
    minutes: float
    procedure: Callable[[Budget, PlotFolder], Procedure]
    gpu: bool = False
    needs: tuple[str, ...] = ()

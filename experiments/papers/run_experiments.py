"""Run experiments one after the other within a budget, and store the section of each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from data.files import commit
from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder
from experiments.papers.job import Job, Results
from experiments.papers.job_runner import JobRunner
from experiments.papers.section import Section

# The part of the minutes that is planned. The jobs of a round do not end at the same time, so some
# of the cores are idle for the rest.
_PLANNED = 0.95
# The smallest part of its share that an experiment gets after earlier ones took too long.
_LEAST = 0.1
_SECTION = TypeAdapter(Section)

# (experiment, results so far, results requested so far, its budget)
Report = Callable[[Experiment, int, int, Budget], None]


def silent(_experiment: Experiment, _done: int, _total: int, _budget: Budget) -> None:
    """A `Report` that does nothing."""


def run_experiments(
    experiments: Sequence[Experiment],
    runner: JobRunner,
    minutes: float,
    report: Report = silent,
    *,
    kept: Path | None = None,
    first_seed: int = 0,
) -> list[Section]:
    """Run the experiments within `minutes` in total, the shortest first, and return their sections.

    Each experiment gets a share of the minutes, which determines its sizes. If earlier ones took
    longer than planned, it is smaller; minutes that they did not use are spent on more rounds. The
    longest experiment is last, because it can adapt best. Plots are stored in `runner.out`, and
    sections in `kept` or, if it is None, in the folder `sections` of `runner.out`.
    """
    sections = []
    charged: set[Job] = set()
    left = minutes = _PLANNED * minutes
    waiting = designed = sum(experiment.minutes for experiment in experiments)
    for experiment in sorted(experiments, key=lambda one: one.minutes):
        planned = minutes * experiment.minutes / designed
        allowed = max(left * experiment.minutes / waiting, _LEAST * planned)
        budget = Budget(
            min(planned, allowed), experiment.minutes, allowed=allowed, first_seed=first_seed
        )
        waiting -= experiment.minutes
        section = replace(
            _one(experiment, runner, budget, charged, report),
            name=experiment.name,
            paper=experiment.paper,
            title=experiment.title,
            minutes=budget.spent,
        )
        left -= budget.spent
        path = (kept or runner.out / "sections") / f"{experiment.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(path, _SECTION.dump_json(section, indent=1) + b"\n")
        sections.append(section)
    return sections


def stored_sections(
    out: Path, experiments: Sequence[Experiment], *, kept: Path | None = None
) -> list[Section]:
    """Return the sections of finished experiments, in the order of `experiments`.

    Raises ValueError for a file that is damaged or has the format of another version.
    """
    paths = [(kept or out / "sections") / f"{one.name}.json" for one in experiments]
    return [_stored(path) for path in paths if path.is_file()]


def _stored(path: Path) -> Section:
    try:
        return _SECTION.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} cannot be read ({where}: {first['msg']}): delete it, and run its experiment "
            "again, which uses the stored results"
        ) from None


def _one(
    experiment: Experiment,
    runner: JobRunner,
    budget: Budget,
    charged: set[Job],
    report: Report,
) -> Section:
    """Run one experiment.

    A job that several experiments share is charged only to the first of them: `charged` contains
    the jobs that have been charged already.
    """
    procedure = experiment.procedure(budget, PlotFolder(runner.out / "plots"))
    everything: Results = {}
    jobs = next(procedure)
    while True:
        before = len(everything)

        def charge(found: Results, total: int, before: int = before) -> None:
            new = {job: result for job, result in found.items() if job not in charged}
            seconds = sum(result.seconds for result in new.values())
            budget.spent += seconds / (60 * max(1, runner.workers))
            charged.update(new)
            report(experiment, before + len(found), before + total, budget)

        results = runner.measure(jobs, charge)
        everything |= results
        try:
            jobs = procedure.send(results)
        except StopIteration as end:
            section: Section = end.value
            return section

"""Runs experiments one after the other within a budget, and keeps the section of each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Experiment
from benchmarks.papers.job import Job
from benchmarks.papers.laboratory import Laboratory
from benchmarks.papers.section import Section
from data.aside import commit

# (experiment, results so far, results asked for so far, minutes spent, minutes it may take)
Report = Callable[[Experiment, int, int, Budget], None]


def silent(_experiment: Experiment, _done: int, _total: int, _budget: Budget) -> None:
    """Reports nothing."""


def conduct(
    experiments: Sequence[Experiment],
    laboratory: Laboratory,
    minutes: float | None,
    report: Report = silent,
) -> list[Section]:
    """The sections of the experiments within `minutes` together; None: the published sizes.

    An experiment has its share of the minutes, by which its sizes are chosen, and what those
    before it left over, for more rounds. Sections and pictures are kept below `laboratory.out`.
    """
    sections = []
    charged: set[Job] = set()
    designed = sum(experiment.minutes for experiment in experiments)
    left = minutes
    for number, experiment in enumerate(experiments):
        budget = Budget(None, experiment.minutes)
        if minutes is not None and left is not None:
            share = minutes * experiment.minutes / designed
            budget = Budget(share, experiment.minutes)
            waiting = sum(one.minutes for one in experiments[number:])
            budget.allowed = max(share, left * experiment.minutes / waiting)
        section = _one(experiment, laboratory, budget, charged, report)
        section = replace(section, minutes=budget.spent)
        if left is not None:
            left -= budget.spent
        path = laboratory.out / "sections" / f"{experiment.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(path, json.dumps(section.to_json(), indent=1).encode())
        sections.append(section)
    return sections


def kept_sections(laboratory: Laboratory, experiments: Sequence[Experiment]) -> list[Section]:
    """Of those experiments that were conducted, now or before, in the order of `experiments`."""
    paths = [laboratory.out / "sections" / f"{one.name}.json" for one in experiments]
    return [
        Section.from_json(json.loads(path.read_text(encoding="utf-8")))
        for path in paths
        if path.is_file()
    ]


def _one(
    experiment: Experiment,
    laboratory: Laboratory,
    budget: Budget,
    charged: set[Job],
    report: Report,
) -> Section:
    """A job that several experiments ask for is charged to the first of them (`charged`)."""
    course = experiment.course(budget, Album(laboratory.out / "pictures"))
    done = 0
    jobs = next(course)
    while True:
        before = done

        def told(of_these: int, total: int, before: int = before) -> None:
            report(experiment, before + of_these, before + total, budget)

        results = laboratory.measure(jobs, told)
        done += len(results)
        seconds = sum(one.seconds for job, one in results.items() if job not in charged)
        budget.spent += seconds / (60 * max(1, laboratory.workers))
        charged.update(results)
        report(experiment, done, done, budget)
        try:
            jobs = course.send(results)
        except StopIteration as end:
            section: Section = end.value
            return section

"""Runs experiments one after the other within a budget, and keeps the section of each."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Experiment
from benchmarks.papers.job import Job, Results
from benchmarks.papers.laboratory import Laboratory, result_path
from benchmarks.papers.provenance import outdated
from benchmarks.papers.section import Section
from data.files import commit

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
    before it left over, for more rounds. Sections and figures are kept below `laboratory.out`.
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


def kept_sections(out: Path, experiments: Sequence[Experiment]) -> list[Section]:
    """The sections under a laboratory's `out`, in the order of `experiments`, of those that have
    ended.

    Sections in the format of an earlier version are left out; conducting the experiment again
    writes them from its kept results.
    """
    paths = [out / "sections" / f"{one.name}.json" for one in experiments]
    read = [
        Section.from_json(json.loads(path.read_text(encoding="utf-8")))
        for path in paths
        if path.is_file()
    ]
    return [
        replace(section, outdated=_outdated(out, section.results))
        for section in read
        if section is not None
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
    everything: Results = {}
    jobs = next(course)
    while True:
        before = len(everything)

        def told(found: Results, total: int, before: int = before) -> None:
            new = {job: result for job, result in found.items() if job not in charged}
            seconds = sum(result.seconds for result in new.values())
            budget.spent += seconds / (60 * max(1, laboratory.workers))
            charged.update(new)
            report(experiment, before + len(found), before + total, budget)

        results = laboratory.measure(jobs, told)
        everything |= results
        try:
            jobs = course.send(results)
        except StopIteration as end:
            section: Section = end.value
            keys = [job.key for job in everything]
            return replace(section, results=keys, outdated=_outdated(laboratory.out, keys))


def _outdated(out: Path, keys: Sequence[str]) -> list[str]:
    """`12 of 80 results: older code, torch 2.12.0`, for each combination of reasons."""
    kept = (json.loads(result_path(out, key).read_text(encoding="utf-8")) for key in keys)
    reasons = Counter(outdated(one) for one in kept)
    return [
        f"{count} of {len(keys)} results: {', '.join(why)}" for why, count in reasons.items() if why
    ]

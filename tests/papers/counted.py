"""A job that appends a line to a file each time it runs, in a module that is quick to import."""

import os
from collections.abc import Mapping
from typing import Any

from experiments.papers.job import Folders, Job, Measures
from tests.waiting import wait_until


class Doubling(Job):
    """A job that workers import from this module instead of experiments.papers."""

    def resolve(self) -> Any:
        return _double


def doubling(number: int, *, kills_after: Job | None = None) -> Job:
    """Return a job that doubles `number`.

    kills_after: another job. As soon as its result is stored, this job kills its own process
    instead of returning.
    """
    settings: dict[str, Any] = {"number": number}
    if kills_after is not None:
        settings["kills_after"] = kills_after.key
    return Doubling("double", settings)


def _double(settings: Mapping[str, Any], folders: Folders) -> Measures:
    with (folders.data / "done").open("a") as done:
        done.write(f"{settings['number']}\n")
    if key := settings.get("kills_after"):
        wait_until((folders.shards.parent / "results" / f"{key}.json").is_file)
        os._exit(1)
    return {"double": 2 * settings["number"]}

"""A job that leaves a line each time it is measured; in a module that workers import quickly."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.papers.job import Job, Measures, Places


class Doubling(Job):
    """Found in a worker by this module's name, not below benchmarks.papers."""

    def resolve(self) -> Any:
        return _double


def doubling(number: int, *, kills_after: Job | None = None) -> Job:
    """Twice `number`, in `double`; or it ends its process as soon as another job's result is
    kept."""
    settings: dict[str, Any] = {"number": number}
    if kills_after is not None:
        settings["kills_after"] = kills_after.key
    return Doubling("double", settings)


def _double(settings: Mapping[str, Any], places: Places) -> Measures:
    with (places.data / "done").open("a") as done:
        done.write(f"{settings['number']}\n")
    if key := settings.get("kills_after"):
        until((places.shards.parent / "results" / f"{key}.json").is_file)
        os._exit(1)
    return {"double": 2 * settings["number"]}


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for it. TimeoutError after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it was waited for in vain")
        time.sleep(0.01)

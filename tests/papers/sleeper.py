"""A laboratory whose only job sleeps, for a test that kills it."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.laboratory import Laboratory


class Sleeping(Job):
    def resolve(self) -> Any:
        return _sleep


def _sleep(_settings: Mapping[str, Any], places: Places) -> Measures:
    begun = places.data / "begun"
    begun.write_text(str(os.getpid()))
    begun.rename(places.data / "worker")
    time.sleep(600)
    return {}


def sleep_in_laboratory(folder: Path) -> None:
    """Run the job. To be called in a separate process, which prints nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # A shell that runs the tests in the background may ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Laboratory(folder, folder / "out", workers=1) as laboratory:
        laboratory.measure([Sleeping("sleeper", {})])

"""A runner for a test that kills it. Its only job sleeps."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.papers.job import Folders, Job, Measures
from experiments.papers.job_runner import JobRunner


class Sleeping(Job):
    def resolve(self) -> Any:
        return _sleep


def _sleep(_settings: Mapping[str, Any], folders: Folders) -> Measures:
    begun = folders.data / "begun"
    begun.write_text(str(os.getpid()))
    begun.rename(folders.data / "worker")
    time.sleep(600)
    return {}


def sleep_in_runner(folder: Path) -> None:
    """Run the job without printing anything. Call this in a separate process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with JobRunner(folder, folder / "out", workers=1) as runner:
        runner.measure([Sleeping("sleeper", {})])

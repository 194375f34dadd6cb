"""The sections of the record. Each is recorded in a process of its own."""

import gc
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.baseline.values import Record

# The longest first, because two run at a time.
SECTIONS = ("runs", "heads", "samples", "answers")


def record_section(name: str) -> tuple[str, Record, float]:
    """Return the name of a section, its record, and how many seconds that took."""
    started = time.monotonic()
    with TemporaryDirectory(prefix=f"baseline-{name}-") as folder:
        record: Record = import_module(f"tests.baseline.{name}").record(Path(folder))
    gc.unfreeze()  # nanobind reports objects that are not collected at exit
    return name, record, time.monotonic() - started

"""JSONL files whose lines belong to steps: a resumed run writes later steps again."""

import json
import math
import time
from pathlib import Path
from typing import Any

from data.files import NO_SPACE, commit, explained
from data.loading.batch import Batch
from data.retry import is_transient

_MAX_WAITING_BYTES = 4 * 2**20


class JsonLines:
    """A file that records are added to, each line whole as soon as it is written.

    While the disk is full or returns transient errors, up to 4 MiB of lines are buffered: a run
    must not end because of its log, least of all while a checkpoint being written fills the disk.
    """

    def __init__(self, path: Path, *, after_step: int, evaluated: int | None = None) -> None:
        """Lines after `after_step` go, and evaluations after `evaluated`, which come again."""
        drop_lines_after(path, after_step, evaluated=evaluated)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: dict[str, Any]) -> bool:
        """With the time, in seconds since 1970; numbers that are not finite become null. Whether
        all lines are in the file now. Raises OSError where too many wait."""
        line = json.dumps(_finite({"time": round(time.time(), 3), **record}), allow_nan=False)
        self._waiting += f"{line}\n".encode()
        try:
            self._flush()
        except OSError as error:
            may_pass = error.errno in NO_SPACE or is_transient(error)
            if not may_pass or len(self._waiting) > _MAX_WAITING_BYTES:
                with explained(self.path):
                    raise
        return not self._waiting

    def close(self) -> None:
        """Raises OSError for lines that still wait."""
        with self._file, explained(self.path):
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def drop_lines_after(path: Path, step: int, *, evaluated: int | None = None) -> None:
    """Keep the lines of steps up to `step`, evaluations up to `evaluated` (None: `step` too), so
    that each stands in the file once.

    What is no record of a step, such as the cut last line of a killed run, goes too.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [
        f"{line}\n"
        for line in lines
        if _belongs(line, step, step if evaluated is None else evaluated)
    ]
    commit(path, "".join(kept).encode())


def _belongs(line: str, last_step: int, evaluated: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int):
        return False
    return step <= (evaluated if record.get("event") == "evaluation" else last_step)


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity, and readers that follow it refuse Python's."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class SampleLog:
    """If asked for, the ids of every step's samples, a file a rank: what an audit needs."""

    def __init__(self, run: Path, *, rank: int, wanted: bool) -> None:
        self.path = run / f"samples-rank{rank}.jsonl" if wanted else None

    @staticmethod
    def trim(run: Path, step: int) -> None:
        """Drop the lines after `step` from the files of all ranks there ever were."""
        for path in run.glob("samples-rank*.jsonl"):
            drop_lines_after(path, step)

    def __enter__(self) -> "SampleLog":
        self.file = self.path.open("a", encoding="utf-8") if self.path else None
        return self

    def write(self, step: int, batch: Batch) -> None:
        if self.file is not None and self.path is not None:
            record: dict[str, Any] = {"step": step, "samples": batch.indices.tolist()}
            with explained(self.path):
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

"""JSONL files with one record per line, each with its step. A resumed run replaces the records of
the steps that it repeats.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from data.files import NO_SPACE, commit, explained
from data.loading.batch import Batch
from data.retry import is_transient, retried

_MAX_BUFFERED_BYTES = 4 * 2**20


class JsonLines:
    """A file to which records are appended, normally without buffering.

    While the disk is full or returns transient errors, up to 4 MiB of lines are buffered in memory:
    a run should not fail because of its log, for example while a checkpoint in progress fills the
    disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT
        self._file = retried(str(path), lambda: os.open(path, flags, 0o666))
        # Write at this position: a failed write may leave part of a line, which the next attempt
        # overwrites.
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._buffered = b""

    def write(self, record: dict[str, Any]) -> bool:
        """Append a record. Non-finite numbers become null.

        Returns whether all lines are in the file. Raises OSError if too many lines are buffered or
        the error is not transient.
        """
        self._buffered += f"{json.dumps(_finite(record), allow_nan=False)}\n".encode()
        try:
            self._flush()
        except OSError as error:
            is_temporary = error.errno in NO_SPACE or is_transient(error)
            if not is_temporary or len(self._buffered) > _MAX_BUFFERED_BYTES:
                with explained(self.path):
                    raise
        return not self._buffered

    def close(self) -> None:
        """Write the remaining lines and close the file. Raises OSError if that fails."""
        try:
            with explained(self.path):
                retried(str(self.path), self._flush)
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        # Another program may have truncated the file. Writing beyond its end would add zero bytes.
        self._end = min(self._end, os.fstat(self._file).st_size)
        while self._buffered:
            written = os.pwrite(self._file, self._buffered, self._end)
            self._end += written
            self._buffered = self._buffered[written:]


def drop_lines_after(path: Path, step: int, *, evaluated: int | None = None) -> None:
    """Keep only the lines of steps up to `step`, and evaluations up to `evaluated` (by default
    `step`), so that each record is in the file only once.

    Also drops lines that are not records of a step, such as the incomplete last line of a killed
    run.
    """
    try:
        text = retried(str(path), lambda: path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return
    kept = [
        f"{line}\n"
        for line in text.splitlines()
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
    """Replace NaN and infinity with None. JSON does not support them, and strict parsers reject
    Python's notation for them.
    """
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class SampleLog:
    """Logs the sample IDs of every step to one file per rank, for audits. Does nothing unless
    `enabled`.
    """

    def __init__(self, run: Path, *, rank: int, enabled: bool) -> None:
        self.path = run / f"samples-rank{rank}.jsonl" if enabled else None

    @staticmethod
    def trim(run: Path, step: int) -> None:
        """Drop the lines after `step` from the files of all ranks, including ranks that existed
        only in earlier starts.
        """
        for path in run.glob("samples-rank*.jsonl"):
            drop_lines_after(path, step)

    def __enter__(self) -> "SampleLog":
        self.lines = JsonLines(self.path) if self.path else None
        return self

    def write(self, step: int, batch: Batch) -> None:
        if self.lines is not None:
            self.lines.write({"step": step, "samples": batch.indices.tolist()})

    def __exit__(self, *_: object) -> None:
        if self.lines is not None:
            self.lines.close()

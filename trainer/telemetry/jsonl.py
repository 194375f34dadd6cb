"""JSONL files with one record per line, each with its step. A resumed run replaces the records of
the steps that it repeats.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from data.files import NO_SPACE, commit, explained
from data.loading.batch import Batch
from data.retry import is_transient

_MAX_BUFFERED_BYTES = 4 * 2**20


class JsonLines:
    """A file to which records are appended, normally without buffering.

    While the disk is full or returns transient errors, up to 4 MiB of lines are buffered in memory:
    a run should not fail because of its log, for example while a checkpoint in progress fills the
    disk.
    """

    def __init__(self, path: Path, *, after_step: int, evaluated: int | None = None) -> None:
        """Drop lines after step `after_step` and evaluations after step `evaluated`, because they
        will be written again.
        """
        drop_lines_after(path, after_step, evaluated=evaluated)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._buffered = b""

    def write(self, record: dict[str, Any]) -> bool:
        """Append a record with the time in seconds since 1970. Non-finite numbers become null.

        Returns whether all lines are in the file. Raises OSError if too many lines are buffered or
        the error is not transient.
        """
        line = json.dumps(_finite({"time": round(time.time(), 3), **record}), allow_nan=False)
        self._buffered += f"{line}\n".encode()
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
        with self._file, explained(self.path):
            self._flush()

    def _flush(self) -> None:
        while self._buffered:
            self._buffered = self._buffered[self._file.write(self._buffered) :]


def drop_lines_after(path: Path, step: int, *, evaluated: int | None = None) -> None:
    """Keep only the lines of steps up to `step`, and evaluations up to `evaluated` (by default
    `step`), so that each record is in the file only once.

    Also drops lines that are not records of a step, such as the incomplete last line of a killed
    run.
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

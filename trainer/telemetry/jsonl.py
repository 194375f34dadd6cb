"""JSONL files with one record per line, each with its step, and the log of skipped steps. A resumed
run replaces the records of the steps that it repeats.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from data.files import NO_SPACE, commit, explained
from data.loading.batch import Batch
from data.retry import is_transient, retried

_MAX_BUFFERED_BYTES = 4 * 2**20


class Event(NamedTuple):
    """A line to print, and a record of the metrics with the values."""

    name: str
    step: int
    line: str
    values: dict[str, Any]


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
    kept = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
            is_evaluation = record.get("event") == "evaluation" and evaluated is not None
            if record["step"] <= (evaluated if is_evaluation else step):
                kept.append(f"{line}\n")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    commit(path, "".join(kept).encode())


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None. JSON does not support them, and strict parsers reject
    Python's notation for them.
    """
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def trim_logs(run: Path, step: int) -> None:
    """Drop the samples logged after `step`, on all ranks, including ranks that existed only in
    earlier starts."""
    for pattern in ("samples-rank*.jsonl", "nonfinite-rank*.jsonl"):
        for path in run.glob(pattern):
            drop_lines_after(path, step)


def log_skipped_step(
    path: Path,
    step: int,
    batch: Batch,
    reason: str,
    *,
    count: int,
    cap: int,
    key_of: Callable[[int], str] | None,
) -> str:
    """Log this rank's samples of a skipped step to `path`, and return a message.

    A bad sample is often the cause of a skipped step. `key_of` returns the key of a sample (None:
    samples do not have keys). All ranks see the same loss and the same global norm, so they make
    the same decision. Raises FloatingPointError if `count`, the number of skipped steps of the run
    including this one, is more than `cap`.
    """
    samples = batch.indices.tolist()
    record: dict[str, object] = {"step": step, "samples": samples}
    if key_of is not None:
        record["keys"] = [key_of(sample) for sample in samples]
    with closing(JsonLines(path)) as lines:
        lines.write(record)
    files = path.with_name("nonfinite-rank*.jsonl")
    line = f"step {step}: {reason}; the update was skipped, and its samples are in {files}"
    if count > cap:
        raise FloatingPointError(
            f"{line}: lower optimizer.lr, increase schedule.warmup, set train.clip_norm, or "
            f"inspect the samples (train.max_skipped_steps is {cap})"
        )
    return f"{line} ({count} of at most {cap} skipped)"

"""A log of the classes, thresholds and counts of each query, without its inputs. Each query is a
line of JSON, for example (here in two lines)

{"time": 1767225600.0, "model": "pets", "version": "0b1d6a3f5c7e9124", "classes": [17],
 "thresholds": [1.73], "inputs": 8, "passed": [2]}

Queries without a threshold are not logged. If drift is monitored, the result of each period is a
line with the key `drift`. Each replica has its own file, `queries-0.jsonl` or a higher number. A
file of 64 MiB is renamed to `queries-0.jsonl.1`, which replaces the previous one.
"""

import fcntl
import json
import logging
import time
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from serving.schemas import Answer, ClassDrift

_MOST_BYTES = 64 * 2**20
_MOST_FILES = 1000


class QueryLog:
    """The log of one replica in `folder`, which is created if it does not exist. Raises ValueError
    if it cannot be written.
    """

    def __init__(self, folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock, path = _own_file(folder)
            self._file = RotatingFileHandler(path, maxBytes=most_bytes, backupCount=1)
        except OSError as error:
            raise ValueError(
                f"query log {folder} cannot be written ({error.strerror}). Pass a writable folder"
            ) from error

    def of_model(self, name: str, version: str) -> "ModelLog":
        """Return the log of one version of a model."""
        return ModelLog(self, name, version)

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def write(self, **values: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), **values})
        # If the disk is full, the handler prints the error, and the query is answered.
        self._file.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))


class ModelLog:
    """The lines of one version of a model in the log of its replica."""

    def __init__(self, log: QueryLog, name: str, version: str) -> None:
        self._write = partial(log.write, model=name, version=version)

    def add_answer(self, answer: Answer) -> None:
        decided = answer.thresholds
        if not decided:
            return
        passed = [
            sum(bool(result.verdicts[column].match) for result in answer.results)
            for column in range(len(decided))
        ]
        self._write(
            classes=[one.class_id for one in decided],
            thresholds=[one.threshold for one in decided],
            inputs=len(answer.results),
            passed=passed,
        )

    def add_period(self, drift: ClassDrift) -> None:
        self._write(drift=drift.model_dump())


def _own_file(folder: Path) -> tuple[Any, Path]:
    """Return the first log that no other process writes, and its lock."""
    for number in range(_MOST_FILES):
        lock = (folder / f"queries-{number}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return lock, folder / f"queries-{number}.jsonl"
    raise ValueError(f"query log {folder} is used by {_MOST_FILES} replicas. Pass another folder")

"""The base class of sources that read their files twice: the first pass selects samples, and the
second writes them.

The result of the first pass is stored on disk until the shards have been written. Each source
defines which records it uses and how it selects classes.
"""

import fcntl
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from data.files import flush, temporary_path
from data.messages import Report, silent
from data.remote.input_path import InputPath
from data.remote.path import RemotePath
from data.shards.split_names import renamed_splits, shard_splits
from data.sources.source import CommandSource
from data.text.records import RecordFile, open_records
from data.text.references import LabeledText, Span
from data.text.selection import Selection, SelectionFolder, SelectionRules, Task, pass_notes


class FirstPassSource(CommandSource):
    """A source whose first pass stores its result in `work` and reports its progress."""

    reads_first = True

    work: Path
    ray: str | None
    report: Report

    @property
    def pass_workers(self) -> int | None:
        """The number of processes of the first pass, or None for one per core."""
        return None

    @abstractmethod
    def pass_files(self) -> Sequence[InputPath]:
        """Return the files, in the order in which references number them."""

    def record_files(self) -> Sequence[InputPath]:
        """Return the files that contain the records, by number."""
        return self.pass_files()

    def record_file(self, number: int) -> RecordFile:
        """Open a file of records in this process."""
        if number not in self._opened:
            name = str(self.record_files()[number])
            self._opened[number] = open_records(self.local_file(number), name)
        return self._opened[number]

    def local_file(self, number: int) -> Path:
        """Return a local file with the records of a file: the file itself, or a copy in `work`.

        Records are read at random. Each machine therefore copies a file at a URL when it is first
        needed.
        """
        path = self.record_files()[number]
        if isinstance(path, Path):
            return path
        copy = self.work / f"file-{number:06d}{path.suffix}"
        return made_once(copy, lambda: _copy(path, copy))

    @abstractmethod
    def pass_rules(self) -> SelectionRules:
        """Return the rules for selecting classes and handling duplicates."""

    @abstractmethod
    def spans(self) -> list[Span]: ...

    @abstractmethod
    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]: ...

    def splits(self) -> dict[str, Sequence[Task]]:
        folder = SelectionFolder(self.work)
        in_shards = shard_splits(self._selection.splits)
        return {in_shards[split]: folder.tasks(split) for split in self._selection.splits}

    def notes(self) -> list[str]:
        """Return one line for each item that was skipped, found or renamed.

        Call this after the first pass.
        """
        return pass_notes(self._selection) + renamed_splits(self._selection.splits)

    def clean_up(self) -> None:
        """Delete the results of the first pass."""
        SelectionFolder(self.work).remove()

    @cached_property
    def _opened(self) -> dict[int, RecordFile]:
        return {}

    @cached_property
    def _selection(self) -> Selection:
        # Include the absolute paths in order, because references identify files by their position
        # in the list.
        files = [str(path.resolve()) for path in self.pass_files()]
        about = json.dumps([self.describe().model_dump(), files])
        return SelectionFolder(self.work).select(
            about,
            self,
            self.pass_rules(),
            workers=self.pass_workers,
            ray=self.ray,
            report=self.report,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Workers only read records, which they open themselves. They need neither the result of the
        # first pass nor the progress callback.
        left_out = ("report", "_selection", "_opened")
        state = {k: v for k, v in self.__dict__.items() if k not in left_out}
        return {**state, "report": silent}


def made_once(path: Path, make: Callable[[], None]) -> Path:
    """Return `path`, which `make` creates if it does not exist.

    Other processes on this machine wait for it.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("wb") as lock:  # closing the file releases the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                make()
    return path


def _copy(path: InputPath, copy: Path) -> None:
    assert isinstance(path, RemotePath)
    with temporary_path(copy) as temporary:
        with temporary.open("wb") as file:
            path.copy_to(file)
            flush(file)
        temporary.replace(copy)

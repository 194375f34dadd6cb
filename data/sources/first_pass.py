"""The base class of sources that read their files twice: the first pass selects samples, and the
second writes them.

The result of the first pass is stored on disk until the shards have been written. Each source
defines which records it uses and how it selects classes.
"""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from data.messages import Report, silent
from data.shards.split_names import renamed_splits, shard_splits
from data.sources.source import CommandSource
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
    def pass_files(self) -> Sequence[Path]:
        """Return the files, in the order in which references number them."""

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
        # Workers only read records. They need neither the result of the first pass nor the progress
        # callback.
        state = {k: v for k, v in self.__dict__.items() if k not in ("report", "_selection")}
        return {**state, "report": silent}

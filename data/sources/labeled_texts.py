"""Text files with one text per line, each with a label file whose lines contain the labels of the
corresponding texts.

This is the layout of tweeteval: train_text.txt, train_labels.txt, val_…, test_…, mapping.txt.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, Literal

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, silent
from data.option import Argument, Option, Supplied
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import split_name
from data.sources.first_pass import FirstPassSource
from data.sources.source import STRICT, Sample
from data.text.cleaning import Cleaning
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import fold
from data.text.records import KINDS, TEXT_OF_LINES, RecordFile, digest, open_records
from data.text.references import LabeledText, Span
from data.text.selection import SelectionRules, Task

_FILES = ("train", "val", "test")  # prefixes of _text.txt and _labels.txt


@dataclass(frozen=True, config=STRICT)
class LabeledTexts(FirstPassSource):
    """A folder of labeled texts in the layout of tweeteval.

    Emoji and their parts are removed from the texts, because the published texts contain U+FE0F
    where an emoji was removed. User names and URLs are masked. Labels are numbers or names.
    `mapping.txt` (tab-separated number, emoji and name) maps the numbers to classes.
    """

    kind = "labelled-texts"
    modality = "text"
    reads = "a folder of labeled texts"
    held_out = "val_text.txt and test_text.txt"

    folder: Annotated[
        Path,
        Argument(),
        Field(description="folder that contains train_text.txt, train_labels.txt and mapping.txt"),
    ]
    work: Annotated[Path, Supplied()]
    texts: Annotated[Literal["clean", "keep"], Option("--keep-texts", flag="keep")] = Field(
        default="clean", description="store the texts of a labeled folder unchanged"
    )
    duplicates: Annotated[Literal["drop", "keep"], Option("--keep-duplicates", flag="keep")] = (
        Field(default="drop", description="keep duplicate texts within the same class and split")
    )
    across: Annotated[Literal["drop", "keep"], Option("--drop-across", flag="drop")] = Field(
        default="keep", description="drop training texts that also occur in another split"
    )
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self._splits:
            raw = sorted({path.suffix for path in self.folder.iterdir()} & KINDS.keys())
            also = f", or pass files of raw tweets ({self.folder}/*{raw[0]})" if raw else ""
            raise FileNotFoundError(
                f"{self.folder / 'train_text.txt'} is missing: pass a folder that contains "
                f"train_text.txt and train_labels.txt, and the same files for val and test{also}"
            )
        for path in self.files:
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: add the labels for the text file")

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(chain(*((self._text_file(s), self._label_file(s)) for s in self._splits)))

    def describe(self) -> SourceInfo:
        mapping = [self._mapping_file] if self._mapping_file.is_file() else []
        parameters: dict[str, Any] = {
            "files": digest([*self.files, *mapping]),
            "texts": self.texts,
            "duplicates": self.duplicates,
            "across": self.across,
            "emoji": emoji.__version__,
        }
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        if (found := self._emoji) is not None:
            return emoji_classes(found)
        return tuple(ClassInfo(name=self._named.get(x, (x, x))[1]) for x in self._selection.labels)

    def label_vectors(self) -> np.ndarray | None:
        return None if (found := self._emoji) is None else emoji_vectors(found)

    def render(self, task: Task) -> Sample:
        fields = self._records[task.file].read(task.offset, task.length)
        text = self._text(fields)
        return Sample(f"{task.file:x}-{task.offset:x}", text.encode(), "txt", task.label)

    def spans(self) -> list[Span]:
        # There is one span per file: labels are matched by line number, so each file must be read
        # from the beginning.
        return [Span(number, 0, one.size) for number, one in enumerate(self._records)]

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        one, name = self._records[span.file], self._splits[span.file]
        labels = chain(self._labels(name), repeat(None))
        lines = 0
        for offset, data in one.records(span.first, span.last, empty=True):
            lines += 1
            if (label := next(labels)) is None:
                raise ValueError(
                    f"{self._label_file(name)} contains {lines - 1} labels, but {one.path} "
                    "contains more texts: add one label per text"
                )
            counts["texts read"] += 1
            try:
                text = self._text(one.parse(data))
            except UnicodeDecodeError:
                counts["texts that are not UTF-8"] += 1
                continue
            if text.strip():
                yield LabeledText(offset, len(data), text, label, split_name(name))
            else:
                counts["texts that contain only emoji, user names and URLs"] += 1
        if next(labels) is not None:
            raise ValueError(
                f"{one.path} contains {lines} texts, but {self._label_file(name)} contains more "
                "labels: keep one label per text"
            )

    def _labels(self, name: str) -> Iterator[str]:
        with self._label_file(name).open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not (label := line.strip()):
                    raise ValueError(
                        f"{self._label_file(name)}, line {number} is empty: add the label"
                    )
                yield label

    def _text(self, fields: dict[str, Any]) -> str:
        text = str(fields[TEXT_OF_LINES])
        return Cleaning().clean(text) if self.texts == "clean" else text

    def _choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the labels in mapping order.

        Without a mapping, they are sorted by number if all labels are numbers, otherwise by name.
        """
        if self._named:
            if unknown := sorted(set(samples) - set(self._named)):
                raise ValueError(
                    f"label {unknown[0]!r} is missing from {self._mapping_file}: add it"
                )
            return list(self._named)
        numbers = all(label.isdecimal() for label in samples)
        return sorted(samples, key=lambda label: (int(label), label) if numbers else (0, label))

    @property
    def _emoji(self) -> list[str] | None:
        """The folded emoji of the classes, or None if a class does not have an emoji."""
        found = [self._named.get(label, ("", ""))[0] for label in self._selection.labels]
        return [fold(one) for one in found] if set(found) <= emoji.EMOJI_DATA.keys() else None

    @cached_property
    def _named(self) -> dict[str, tuple[str, str]]:
        """Map each label to (second column, readable name) as given in the mapping."""
        if not self._mapping_file.is_file():
            return {}
        named = {}
        for line in self._mapping_file.read_text(encoding="utf-8").splitlines():
            label, *rest = [*line.split("\t"), ""]
            if label.strip():
                name = rest[1] if len(rest) > 1 else ""
                named[label.strip()] = (rest[0], name.strip("_ ").replace("_", " ") or rest[0])
        return named

    @property
    def _splits(self) -> list[str]:
        """Return the prefixes of the existing files, training first. The result is empty if the
        training file is missing.
        """
        found = [name for name in _FILES if self._text_file(name).is_file()]
        return found if "train" in found else []

    def _text_file(self, name: str) -> Path:
        return self.folder / f"{name}_text.txt"

    def _label_file(self, name: str) -> Path:
        return self.folder / f"{name}_labels.txt"

    @property
    def _mapping_file(self) -> Path:
        return self.folder / "mapping.txt"

    @cached_property
    def _records(self) -> tuple[RecordFile, ...]:
        return tuple(open_records(self._text_file(name)) for name in self._splits)

    @property
    def pass_workers(self) -> int | None:
        return 1  # labels are counted from the beginning of their file

    def pass_files(self) -> tuple[Path, ...]:
        return self.files

    def pass_rules(self) -> SelectionRules:
        return SelectionRules(
            self._choose,
            drop_duplicates=self.duplicates == "drop",
            drop_across=self.across == "drop",
        )

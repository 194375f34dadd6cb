"""Text files with one text per line, each with a label file whose lines contain the labels of the
corresponding texts.

This is the layout of tweeteval (train_text.txt, train_labels.txt, val_…, test_…, mapping.txt) and
of SemEval 2018 (us_train.text, us_train.labels, us_trial.…, us_test.…, us_mapping.txt).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, shown, silent
from data.option import Argument, Option, Supplied
from data.remote.input_path import Input, InputPath
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import TRAIN, VALIDATION, split_name
from data.skipped import Skipped, by_reason
from data.sources.first_pass import FirstPassSource
from data.sources.source import STRICT, Sample
from data.tars.labels import label_order
from data.text.cleaning import Cleaning
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import fold
from data.text.lines import text_lines
from data.text.records import KINDS, TEXT_OF_LINES, digest
from data.text.references import LabeledText, Span
from data.text.selection import SelectionRules, Task

# The words for splits in file names, training first. SemEval calls its development data trial.
_WORDS = ("train", "trial", "val", "test")
_TRIAL = "trial"
_SEMEVAL = re.compile(rf"(?:(.+)_)?({'|'.join(_WORDS)})\.text")


class _Part(NamedTuple):
    """The files of a split. word: the word for the split in their names."""

    word: str
    texts: InputPath
    labels: InputPath
    prefix: str = ""


@dataclass(frozen=True, config=STRICT)
class LabeledTexts(FirstPassSource):
    """A folder of labeled texts in the layout of tweeteval or of SemEval 2018.

    Emoji and their parts are removed from the texts, because the published texts contain U+FE0F
    where an emoji was removed. User names and URLs are masked. Labels are numbers or names.
    `mapping.txt` (tab-separated number, emoji and name) maps the numbers to classes.
    """

    kind = "labelled-texts"
    modality = "text"
    reads = "a folder of labeled texts"
    held_out = "the files for val, trial and test"

    folder: Annotated[
        Input,
        Argument(),
        Field(
            description="folder that contains train_text.txt, train_labels.txt and mapping.txt, or "
            "us_train.text, us_train.labels and us_mapping.txt"
        ),
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
    ray: Annotated[str | None, Supplied()] = field(default=None, compare=False, repr=False)
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self._parts:
            raw = sorted({path.suffix for path in self.folder.iterdir()} & KINDS.keys())
            also = f", or pass files of raw tweets ({self.folder}/*{raw[0]})" if raw else ""
            raise FileNotFoundError(
                f"{self.folder / 'train_text.txt'} is missing: pass a folder that contains "
                f"train_text.txt and train_labels.txt, or us_train.text and us_train.labels, and "
                f"the same files for the other splits{also}"
            )
        for path in self.files:
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: add the labels for the text file")

    @property
    def files(self) -> tuple[InputPath, ...]:
        return tuple(chain(*((part.texts, part.labels) for part in self._parts)))

    def describe(self) -> SourceInfo:
        mapping = [] if self._mapping_file is None else [self._mapping_file]
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
        fields = self.record_file(task.file).read(task.offset, task.length)
        text = self._text(fields)
        return Sample(f"{task.file:x}-{task.offset:x}", text.encode(), "txt", task.label)

    def spans(self) -> list[Span]:
        # There is one span per file: labels are matched by line number, so each file must be read
        # from the beginning.
        return [
            Span(number, 0, self.record_file(number).size) for number in range(len(self._parts))
        ]

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        one, part = self.record_file(span.file), self._parts[span.file]
        labels = chain(self._labels(part.labels), repeat(None))
        lines = 0
        for offset, data in one.records(span.first, span.last, empty=True):
            lines += 1
            if (label := next(labels)) is None:
                raise ValueError(
                    f"{part.labels} contains {lines - 1} labels, but {one.name} "
                    "contains more texts: add one label per text"
                )
            counts["texts read"] += 1
            try:
                text = self._text(one.parse(data))
            except UnicodeDecodeError:
                counts["texts that are not UTF-8"] += 1
                continue
            if text.strip():
                yield LabeledText(offset, len(data), text, label, self._split_of(part))
            else:
                counts["texts that contain only emoji, user names and URLs"] += 1
        if next(labels) is not None:
            raise ValueError(
                f"{one.name} contains {lines} texts, but {part.labels} contains more "
                "labels: keep one label per text"
            )

    def _labels(self, path: InputPath) -> Iterator[str]:
        for number, line in text_lines(path):
            if not (label := line.strip()):
                raise ValueError(f"{path}, line {number} is empty: add the label")
            yield label

    def _split_of(self, part: _Part) -> str:
        """Return the split. Trial data is used for training if there is no other training data."""
        if part.word == _TRIAL:
            return VALIDATION if self._parts[0].word == TRAIN else TRAIN
        return split_name(part.word)

    def notes(self) -> list[str]:
        """Return the notes of the first pass, and one line if the trial data is used for
        training.
        """
        first = self._parts[0]
        trial = f"{first.texts.name} is used for training, because there is no training file"
        return super().notes() + by_reason(self.skipped()) + [trial] * (first.word == _TRIAL)

    def skipped(self) -> list[Skipped]:
        """Return the text files whose names do not contain a split."""
        read = {part.texts for part in self._parts}
        reason = f"its name does not end in one of the splits {', '.join(_WORDS)}"
        folder: InputPath = self.folder
        found = sorted(path for path in folder.rglob("*.text") if path not in read)
        return [Skipped(str(path.relative_to(folder)), reason) for path in found]

    def _text(self, fields: dict[str, Any]) -> str:
        text = str(fields[TEXT_OF_LINES])
        return Cleaning().clean(text) if self.texts == "clean" else text

    def _choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the labels in mapping order.

        Without a mapping, they are sorted by number if all labels are numbers, otherwise by name.
        """
        if not trained.total():
            texts = self._parts[0].texts
            raise ValueError(f"{texts} contains no texts for training: add some")
        if self._named:
            if unknown := sorted(set(samples) - set(self._named)):
                raise ValueError(
                    f"label {shown(unknown[0])} is missing from {self._mapping_file}: add it"
                )
            return list(self._named)
        return label_order(samples)

    @property
    def _emoji(self) -> list[str] | None:
        """The folded emoji of the classes, or None if a class does not have an emoji."""
        found = [self._named.get(label, ("", ""))[0] for label in self._selection.labels]
        return [fold(one) for one in found] if set(found) <= emoji.EMOJI_DATA.keys() else None

    @cached_property
    def _named(self) -> dict[str, tuple[str, str]]:
        """Map each label to (second column, readable name) as given in the mapping."""
        if self._mapping_file is None:
            return {}
        named = {}
        for _, line in text_lines(self._mapping_file):
            label, *rest = [*line.rstrip("\r\n").split("\t"), ""]
            if label.strip():
                name = rest[1] if len(rest) > 1 else ""
                named[label.strip()] = (rest[0], name.strip("_ ").replace("_", " ") or rest[0])
        return named

    @cached_property
    def _parts(self) -> list[_Part]:
        """The files of the splits, training first, or nothing if there is no training file.

        Raises ValueError if the folder contains several data sets.
        """
        found = {word: self._tweeteval(word) for word in _WORDS}
        parts = [part for part in found.values() if part.texts.is_file()] or self._semeval()
        return parts if parts and parts[0].word in (TRAIN, _TRIAL) else []

    def _tweeteval(self, word: str) -> _Part:
        return _Part(word, self.folder / f"{word}_text.txt", self.folder / f"{word}_labels.txt")

    def _semeval(self) -> list[_Part]:
        """Return the files in the folder or, as published, in its subfolders trial/ and test/."""
        parts = []
        for path in sorted([*self.folder.glob("*.text"), *self.folder.glob("*/*.text")]):
            if (match := _SEMEVAL.fullmatch(path.name)) is not None:
                labels = path.with_suffix(".labels")
                parts.append(_Part(match[2], path, labels, match[1] or ""))
        for one in parts[1:]:
            if one.prefix != parts[0].prefix:
                raise ValueError(
                    f"{self.folder} contains {parts[0].texts.name} and {one.texts.name}, which are "
                    "different data sets: move one to another folder"
                )
            if twice := next((p for p in parts if p.word == one.word and p is not one), None):
                raise ValueError(f"{twice.texts} and {one.texts} are the same split: remove one")
        return sorted(parts, key=lambda part: _WORDS.index(part.word))

    @cached_property
    def _mapping_file(self) -> InputPath | None:
        """The file mapping.txt or, for SemEval, <prefix>_mapping.txt, possibly in a subfolder."""
        names = ["mapping.txt", *{f"{part.prefix}_mapping.txt" for part in self._parts}]
        folder: InputPath = self.folder
        paths = [path for name in names for path in sorted(folder.glob(name))]
        paths += [path for name in names for path in sorted(folder.glob(f"*/{name}"))]
        return next((path for path in paths if path.is_file()), None)

    @property
    def pass_workers(self) -> int | None:
        return 1  # labels are counted from the beginning of their file

    def pass_files(self) -> tuple[InputPath, ...]:
        return self.files

    def record_files(self) -> tuple[InputPath, ...]:
        return tuple(part.texts for part in self._parts)

    def pass_rules(self) -> SelectionRules:
        return SelectionRules(
            self._choose,
            drop_duplicates=self.duplicates == "drop",
            drop_across=self.across == "drop",
        )

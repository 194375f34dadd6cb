"""Lists the images and classes in label files: CSV, TSV, or lines with a path and a label.

Image files are not opened here; they are validated later.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import NamedTuple

from data.messages import shown
from data.remote.input_path import InputPath
from data.shards.split_names import TRAIN, shard_splits, split_name
from data.skipped import Skipped
from data.sources.layouts.class_folders import ENDINGS, File, Listing
from data.sources.layouts.listed_paths import base_of, path_inside
from data.tars.labels import is_number
from data.text.lines import text_lines

HEADERS = (["file", "class"], ["file", "class", "split"])
_FORMS = " or ".join(",".join(header) for header in HEADERS)
_LINES_FOR_BASE = 20


class ClassNames:
    """The class list of a label file. Labels are names or, if they are numbers, positions.

    Each line of the file contains a name, or a name and its number, as in Places.
    """

    def __init__(self, path: InputPath) -> None:
        self.path = path
        lines = [(line.split(), number) for number, line in text_lines(path) if line.strip()]
        numbers = sorted(words[-1] for words, _ in lines if len(words) > 1)
        numbered = bool(numbers) and numbers == sorted(map(str, range(len(lines))))
        if numbered:
            lines = [(words[:-1], at) for words, at in sorted(lines, key=lambda x: int(x[0][-1]))]
        seen: dict[str, int] = {}
        for words, number in lines:
            name = " ".join(words)
            if seen.setdefault(name, number) != number:
                raise ValueError(_repeated(path, name, number, seen[name], numbered))
        if not seen:
            raise ValueError(f"{path} is empty: write one class name per line")
        self.names = list(seen)
        self._known = frozenset(seen)

    def name(self, label: str) -> str:
        """Return the class of a label. Raises ValueError for an unknown label."""
        if label in self._known:
            return label
        if is_number(label) and 0 <= int(label) < len(self.names):
            return self.names[int(label)]
        raise ValueError(
            f"label {shown(label)} is not one of the {len(self.names):,} classes in {self.path}: "
            "correct the label, or pass another --class-names"
        )


def _repeated(path: InputPath, name: str, line: int, other: int, numbered: bool) -> str:
    where = f"{path}, line {line}: {shown(name)} is also on line {other}"
    if numbered:
        return (
            f"{where}, because every line is read as a name and its number: if the numbers belong "
            "to the names, write them without the space, as in class_0"
        )
    return f"{where}: rename one of them"


class _Line(NamedTuple):
    number: int
    path: str
    label: str
    split: str | None


@dataclass
class LabelFiles:
    """Reads label files of the images in `folder`.

    names: the class list, or None if the labels are the names. skip_bad: whether to skip missing
    images instead of raising an error.
    """

    folder: InputPath
    names: ClassNames | None = None
    skip_bad: bool = False
    _seen: dict[str, tuple[InputPath, int]] = field(default_factory=dict)
    _held_out: dict[str, str] = field(default_factory=dict)  # class -> its first line

    def one(self, labels: InputPath) -> Listing:
        """List the lines of a file that covers all splits.

        Raises ValueError or FileNotFoundError, with the line number.
        """
        listing = Listing()
        files = list(self._files(listing, labels, None))
        splits = dict.fromkeys(file.split for file in files if file.split is not None)
        if splits and TRAIN not in splits:
            raise ValueError(f"{labels}: no line has the split {TRAIN!r}: add training images")
        return self._finished(listing, files, splits)

    def of_splits(self, labels: Mapping[str, InputPath], others: Listing) -> Listing:
        """List the lines of one file per split, and add `others`, which has the images of the other
        splits under their canonical names.

        Raises the errors of `one`, and ValueError for an image that is in several splits.
        """
        files = list(others.files)
        self._seen |= {file.path: (self.folder, 0) for file in files}
        listing = Listing(folders=others.folders, skipped=list(others.skipped))
        for name, path in labels.items():
            files += self._files(listing, path, split_name(name))
        return self._finished(listing, files, dict.fromkeys(str(file.split) for file in files))

    def _finished(self, listing: Listing, files: list[File], splits: Iterable[str]) -> Listing:
        in_shards = shard_splits(splits)
        trained = {file.class_name for file in files if file.split in (None, TRAIN)}
        for class_name, where in self._held_out.items():
            if class_name not in trained:
                fix = (
                    "" if self.names else ", or pass the names of numbered labels as --class-names"
                )
                raise ValueError(
                    f"{where}: class {shown(class_name)} has no training images: correct the "
                    f"label, or add training images{fix}"
                )
        listing.files = sorted(
            file._replace(split=in_shards[file.split]) if file.split else file for file in files
        )
        listing.skip_unlisted(self.folder, self._seen)
        listing.skipped.sort()
        return listing

    def _files(self, listing: Listing, labels: InputPath, split: str | None) -> Iterator[File]:
        lines = _lines(labels)
        first = list(islice(lines, _LINES_FOR_BASE))
        base = base_of(self.folder, [line.path for line in first], split, labels)
        for line in chain(first, lines):
            where = f"{labels}, line {line.number}"
            try:
                path = path_inside(self.folder, line.path, base)
                label = line.label if self.names is None else self.names.name(line.label)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if (other := self._seen.get(path)) is not None:
                raise ValueError(f"{where}: {_twice(line.path, other, labels, self.folder)}")
            self._seen[path] = (labels, line.number)
            if not (self.folder / path).is_file():
                if not self.skip_bad:
                    raise FileNotFoundError(
                        f"{where}: {shown(path)} is missing from {self.folder}: "
                        f"{_if_header(line)}add it, remove the line, or pass --skip-bad"
                    )
                listing.skipped.append(Skipped(path, f"listed in {labels.name}, but missing"))
                continue
            line_split = line.split or split
            if line_split not in (None, TRAIN):
                self._held_out.setdefault(label, where)
            yield File(path, label, line_split)


def _if_header(line: _Line) -> str:
    """Return a hint if a missing file may be the name of a column."""
    is_image = PurePosixPath(line.path).suffix.lower() in ENDINGS
    return "" if line.number > 1 or is_image else f"if it is a header, write {_FORMS}, or "


def _twice(name: str, other: tuple[InputPath, int], labels: InputPath, folder: InputPath) -> str:
    file, number = other
    if file == folder:
        return f"{shown(name)} is also in a class folder of another split: remove the line"
    on = f"on line {number}" if file == labels else f"in {file}, line {number}"
    return f"{shown(name)} is already listed {on}: remove one line"


def _lines(labels: InputPath) -> Iterator[_Line]:
    """Yield the lines of a label file, except empty lines and the header."""
    rows = _rows(labels)
    has_split = False
    for first, (number, row, separator) in enumerate(rows):
        cells = [cell.strip() for cell in row]
        if first == 0 and [cell.lower() for cell in cells] in HEADERS:
            has_split = len(cells) == 3
            continue
        expected = 3 if has_split else 2
        # The lines of tiny-imagenet also contain a bounding box.
        if separator == "\t" and not has_split:
            cells = cells[:2]
        if len(cells) != expected or not all(cells):
            form = "file,class,split" if has_split else "file,class"
            fix = f"begin with the header {_FORMS}, or correct it" if first == 0 else "correct it"
            raise ValueError(
                f"{labels}, line {number}: {shown(','.join(row))} is not of the form {form}: {fix}"
            )
        split = split_name(cells[2]) if has_split else None
        if split is not None and not split.isidentifier():
            raise ValueError(
                f"{labels}, line {number}: {shown(cells[2])} is not the name of a split: use names "
                "such as train and test"
            )
        yield _Line(number, cells[0], cells[1], split)


def _rows(labels: InputPath) -> Iterator[tuple[int, list[str], str]]:
    """Yield the number of the first line, the cells and the separator of each row.

    The first line determines the separator: tabs, otherwise commas, otherwise the last space.
    """
    lines = text_lines(labels)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    separator = next((mark for mark in "\t," if mark in first[1]), " ")
    if separator == ",":
        yield from ((number, row, separator) for number, row in _csv_rows(labels, first, lines))
        return
    for number, line in chain([first], lines):
        if line.strip():
            line = line.rstrip("\r\n")
            cells = line.split("\t") if separator == "\t" else line.rsplit(maxsplit=1)
            yield number, cells, separator


def _csv_rows(
    labels: InputPath, first: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(line for _, line in chain([first], lines))
    before = first[0] - 1
    while True:
        number = before + reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{labels}, line {number}: {error}: check for an unclosed quote"
            ) from error
        if row is None:
            return
        if row:
            yield number, row

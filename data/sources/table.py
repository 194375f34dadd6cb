"""Tables with a column of texts, image paths or images, and one or more columns of labels."""

import ast
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from data.files import is_hidden, walk_directory
from data.messages import shown
from data.option import Option
from data.skipped import Skipped
from data.sources.input_files import Input, is_image_name
from data.sources.names import class_name, joined_names
from data.sources.packing import PackedImages
from data.sources.record_source import RecordSource
from data.sources.records import (
    AnyFile,
    Fields,
    ParquetFile,
    Record,
    RecordFile,
    digest,
    field_value,
    text_field,
)
from data.sources.rows import Row, Task
from data.sources.source import STRICT, Modality, Sample

_IMAGE_OPTIONS = {"images", *(field.name for field in fields(PackedImages))}
_URLS = ("http://", "https://", "s3://", "gs://")
_SEPARATORS = "|;,"


@dataclass(frozen=True, config=STRICT)
class Table(PackedImages, RecordSource):
    """A table with a column of texts, image paths or images, and a column of labels.

    Texts are stored unchanged. Images are stored as `imagefolder` stores them. With --label-sets or
    --label-separator, a row has any number of labels (multi-label).
    """

    kind = "table"
    reads = "CSV, TSV, JSONL or Parquet files with the same columns"
    held_out = "rows that --split assigns to other splits, or --test-fraction of the rows"

    label: Annotated[
        str,
        Field(
            description="column that contains the label; with --label-sets, comma-separated columns"
        ),
    ]
    text: str | None = Field(default=None, description="column that contains the text")
    image: str | None = Field(
        default=None,
        description="column that contains the image path or, in Parquet, the image file",
    )
    group: str | None = Field(
        default=None,
        description="column whose rows with the same value stay in the same split, such as a "
        "patient, if there is no --split",
    )
    hierarchy: str | None = Field(
        default=None,
        description='column that contains the nodes above the class, joined by " > "',
    )
    images: Input | None = Field(
        default=None,
        description="folder that contains the images; a path without an extension is searched in "
        "its subfolders too; default: the folder of the first file",
    )
    duplicates: Annotated[Literal["drop", "keep"], Option("--drop-duplicates", flag="drop")] = (
        Field(default="keep", description="drop duplicate rows within the same class and split")
    )
    label_sets: Annotated[bool, Option("--label-sets", flag=True)] = Field(
        default=False,
        description="store a set of labels for each row, from several columns, or from lists in "
        "JSONL or Parquet; a row without labels has an empty set",
    )
    label_separator: str | None = Field(
        default=None,
        min_length=1,
        description="text between the labels in a cell, such as |; each row then has a set of "
        "labels, which is empty for an empty cell",
    )

    @model_validator(mode="before")
    @classmethod
    def _options_are_consistent(cls, given: ArgsKwargs) -> ArgsKwargs:
        named = (given.kwargs or {}).keys()
        if "image" not in named:
            _reject(named & _IMAGE_OPTIONS, "supported only for tables of images (--image)")
        if "split" in named:
            why = "cannot be combined with --split, which defines the test split"
            _reject(named & {"test_fraction", "group"}, why)
        return given

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("table: pass the column of either texts (--text) or images (--image)")
        if self.has_sets and self.hierarchy is not None:
            raise ValueError("--hierarchy: requires one label per row: remove it")
        several = [name.strip() for name in self.label.split(",")]
        for one in self._opened:
            columns = one.columns or ()
            if not self.label_sets and self.label not in columns and {*several} <= {*columns}:
                raise ValueError(
                    f"{one.path}: column {self.label!r} does not exist: pass --label-sets to store "
                    f"the labels of the columns {', '.join(several)} as sets"
                )
        self._check_columns(self.columns)
        for one in self._opened:
            for column in self._labels:
                if isinstance(one, ParquetFile) and one.has_class_names(column):
                    raise ValueError(
                        f"{one.path}: the labels in column {column!r} are numbers with names that "
                        f"the datasets library stored: use kway shard hf {one.path}"
                    )

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return "image" if self.text is None else "text"

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "files": digest(self.files),
            "text": self.text,
            "image": self.image,
            "label": self.label,
            "split": self.split,
            "test_fraction": self.test_fraction,
            "duplicates": self.duplicates,
            "across": self.across,
            "min_count": self.min_count,
        }
        for name in ("group", "hierarchy", "label_separator"):
            if (column := getattr(self, name)) is not None:
                parameters[name] = column
        if self.label_sets:
            parameters["label_sets"] = True
        if self.image is not None:
            parameters |= {
                "root": str(self._root),
                "short_side": self.target_side,
                "quality": self.quality,
                "skip_bad": self.skip_bad,
            }
        return parameters

    def render(self, task: Task) -> Sample | Skipped:
        if self.text is not None:
            return Sample(task.key, task.content, "txt", task.label)
        fix = "correct the row, or pass --skip-bad"
        if not task.key.startswith(_BYTES):
            name = task.content.decode()
            path = self._root / name
            return self.image_sample(
                task.key, task.label, path.read_bytes, name=name, where=path, fix=fix
            )
        key = task.key.removeprefix(_BYTES)
        file, row = (int(number, 16) for number in key.split("-"))
        name = f"{self.files[file].name}, row {row}"
        return self.image_sample(
            key, task.label, lambda: task.content, name=name, where=name, fix=fix
        )

    def row(
        self, number: int, file: AnyFile, record: Record, counts: Counter[str]
    ) -> Iterator[Row]:
        counts["rows read"] += 1
        try:
            row = self._row(number, record.position, file.fields(record))
        except ValueError as error:
            raise ValueError(f"{file.where(record.position)}: the row {error}") from error
        if row is None:
            missing = "text or path" if self.has_sets else "text, path or label"
            counts[f"rows without {missing} skipped"] += 1
        else:
            yield row

    def _row(self, file: int, position: int, values: Fields) -> Row | None:
        """Return a row, or None if it has no content or, without sets of labels, no label."""
        key = f"{file:x}-{position:x}"
        content: bytes | str | None = text_field(values, self._content)
        value = field_value(values, self._content)
        if self.image is not None and isinstance(value, dict):  # {"bytes": …, "path": …}
            value = content = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            if self.image is None:
                raise ValueError(f"has bytes in column {self._content!r}: pass a column of texts")
            key, content = f"{_BYTES}{key}", value
        spellings = [one for column in self._labels for one in self._spellings(values, column)]
        if self.has_sets:
            name, spelling = joined_names(spellings)
        else:
            spelling = "".join(spellings)
            name = class_name(spelling)
        if not (name or self.has_sets) or not content or not content.strip():
            return None
        if isinstance(content, str):
            content = (content if self.image is None else self._found(content)).encode()
        group = None if self.group is None else text_field(values, self.group) or ""
        path = None if self.hierarchy is None else text_field(values, self.hierarchy) or ""
        split = self._split_of(values)
        return Row(file, position, key, content, name, spelling, split, group, path)

    def _spellings(self, values: Fields, column: str) -> list[str]:
        """Return the labels in a cell, as written. Raises ValueError for a list without
        --label-sets, and for lists as text.
        """
        label, text = field_value(values, column), text_field(values, column)
        if self.has_sets and isinstance(label, list | tuple | dict):
            if isinstance(label, dict) or any(
                isinstance(one, list | tuple | dict | bytes) for one in label
            ):
                raise ValueError(f"has the label {shown(label)}: pass lists of names or numbers")
            return [text_field({column: one}, column) or "" for one in label]
        if isinstance(label, list | tuple | dict) or _is_list(text or ""):
            raise ValueError(f"has the label {shown(label)}, a list: {_SEVERAL_LABELS}")
        if text is None:
            return []
        return [text] if self.label_separator is None else text.split(self.label_separator)

    def choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        # A label of a list, or next to a separator, may contain other separators.
        is_checked = self.label_separator is None and (
            not self.label_sets
            or all(isinstance(one, RecordFile) and one.kind != "jsonl" for one in self._opened)
        )
        for name, separator in product(samples if is_checked else [], _SEPARATORS):
            parts = [part.strip() for part in name.split(separator)]
            if len(parts) > 1 and all(part in samples for part in parts):
                raise ValueError(
                    f"{self.files[0]}: label {shown(name)} joins other labels of column "
                    f"{self.label!r}: pass --label-separator {shlex.quote(separator)}, or write "
                    "one label per row"
                )
        return super().choose(samples, trained)

    @property
    def has_sets(self) -> bool:  # type: ignore[override]
        return self.label_sets or self.label_separator is not None

    @property
    def _labels(self) -> list[str]:
        """The columns that contain labels."""
        if not self.label_sets:
            return [self.label]
        return [name.strip() for name in self.label.split(",")]

    @property
    def needs_training(self) -> bool:  # type: ignore[override]
        return self.split is not None

    def _found(self, text: str) -> str:
        """Return the path of an image relative to the folder of the images.

        A path without the extension of an image is searched in the folder. Raises ValueError if
        there are two candidates, and for a path outside the folder.
        """
        name = text.strip()
        if name.lower().startswith(_URLS):
            raise ValueError(
                f"has a URL outside {self._root}, which kway does not download: pass the folder of "
                "the images as --images, or fetch them and pass the column that contains them"
            )
        name = os.path.normpath(name)
        if os.path.isabs(name):
            name = os.path.relpath(name, self._root)
        if name.split(os.sep)[0] == os.pardir:
            raise ValueError(f"has {shown(text)}, which is outside {self._root}: pass --images")
        if is_image_name(name):
            return name
        folder, _, stem = name.rpartition("/")
        candidates = [
            path
            for path in self._by_stem[stem]
            if f"/{path}".rpartition("/")[0].endswith(f"/{folder}" if folder else "")
        ]
        if len(candidates) > 1:
            raise ValueError(
                f"has {shown(text)}, which may be {candidates[0]} or {candidates[1]} in "
                f"{self._root}: add the folder or the extension"
            )
        return candidates[0] if candidates else name

    @cached_property
    def _by_stem(self) -> defaultdict[str, list[str]]:
        """The paths of the files in the folder of the images, by name with and without
        extension.
        """
        found: defaultdict[str, list[str]] = defaultdict(list)
        for parent, folders, names in walk_directory(self._root):
            folders[:] = [one for one in folders if not is_hidden(one)]
            at = "" if parent == self._root else f"{parent.relative_to(self._root).as_posix()}/"
            for name in names:
                if is_image_name(name):
                    found[name.rpartition(".")[0]].append(f"{at}{name}")
                elif not name.startswith("."):
                    found[name].append(f"{at}{name}")
        return found

    @property
    def _content(self) -> str:
        name = self.image if self.text is None else self.text
        assert name is not None
        return name

    @property
    def columns(self) -> list[str]:
        names = (self._content, *self._labels, self.split, self.group, self.hierarchy)
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def _root(self) -> Path:
        return self.files[0].parent if self.images is None else self.images


_BYTES = "bytes-"  # begins the key of a row that contains an image
_SEVERAL_LABELS = (
    "pass --label-sets with lists in JSONL or Parquet, or --label-separator with texts such as a|b "
    "to store sets of labels, or write one label per row"
)


def _is_list(label: str) -> bool:
    """Return whether a cell is a list, such as `['a', 'b']`, `[a, b]` or `[1 2]`."""
    text = label.strip()
    if text[:1] not in ("[", "{", "("):
        return False
    try:
        return isinstance(ast.literal_eval(text), list | tuple | set | dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return re.fullmatch(r"\[[\d.\s]+\]|\[.*,.*\]|\{.*,.*\}", text, re.DOTALL) is not None


def _reject(fields: Collection[str], why: str) -> None:
    if fields:
        names = sorted(f"--{name.replace('_', '-')}" for name in fields)
        raise ValueError(f"{', '.join(names)}: {why}")

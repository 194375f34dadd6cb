"""Tables with a column of texts or image paths and a column of labels."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from data.messages import Report, shown, silent
from data.option import Argument, Option, Supplied
from data.remote.input_path import Input, InputPath
from data.remote.path import RemotePath
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import SPLIT_OF_WORD, split_in_name, split_name
from data.skipped import Skipped
from data.sources.first_pass import FirstPassSource, made_once
from data.sources.layouts.parquet import (
    BYTES_AT,
    class_label_names,
    named_label,
    parquet_as_jsonl,
    parquet_columns,
    read_image,
    row_at,
)
from data.sources.packing import PackedImages
from data.sources.source import STRICT, Modality, Sample
from data.tars.labels import label_order
from data.text.records import digest, open_records, text_field
from data.text.references import SPAN_BYTES, LabeledText, Span, record_spans
from data.text.selection import SelectionRules, Task

_IMAGE_OPTIONS = {"root", *(field.name for field in fields(PackedImages))}
PARQUET = ".parquet"
_URLS = ("http://", "https://", "s3://", "gs://")


@dataclass(frozen=True, config=STRICT)
class Table(PackedImages, FirstPassSource):
    """A table with a column of texts, image paths or images, and a column of labels.

    Texts are stored unchanged. Images are stored just as `imagefolder` stores them.
    """

    kind = "table"
    reads = "CSV, TSV, JSONL or Parquet files with the same columns"
    held_out = "rows that --split assigns to other splits, or --test-fraction of the rows"

    files: Annotated[
        tuple[Input, ...], Argument(), Field(description=".csv, .tsv, .jsonl or .parquet files")
    ]
    work: Annotated[Path, Supplied()]
    label: Annotated[str, Field(description="column that contains the label")]
    text: str | None = Field(default=None, description="column that contains the text")
    image: str | None = Field(
        default=None,
        description="column that contains the image path or, in Parquet, the image file",
    )
    split: str | None = Field(
        default=None,
        description="column that contains the split; by default, --test-fraction of the rows is "
        "held out",
    )
    split_from_name: Annotated[bool, Option("--split-from-name", flag=True)] = Field(
        default=False,
        description="read the split of all rows of a file from the first split name in its file "
        "name, as in train-00000-of-00002.parquet",
    )
    root: Input | None = Field(
        default=None,
        description="folder that contains the images; default: the folder of the first file",
    )
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="fraction of rows to hold out, chosen by a hash of the text",
    )
    duplicates: Annotated[Literal["drop", "keep"], Option("--drop-duplicates", flag="drop")] = (
        Field(default="keep", description="drop duplicate texts within the same class and split")
    )
    across: Annotated[Literal["drop", "keep"], Option("--drop-across", flag="drop")] = Field(
        default="keep", description="drop training texts that also occur in another split"
    )
    min_count: int = Field(default=1, ge=1, description="minimum number of rows per class")
    workers: Annotated[int | None, Supplied()] = None
    ray: Annotated[str | None, Supplied()] = field(default=None, compare=False, repr=False)
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _options_are_consistent(cls, given: ArgsKwargs) -> ArgsKwargs:
        named = (given.kwargs or {}).keys()
        if "image" not in named:
            _reject(named & _IMAGE_OPTIONS, "supported only for tables of images (--image)")
        for name in named & {"split", "split_from_name"}:
            _reject(
                named & {"test_fraction", "split_from_name"} - {name},
                f"cannot be combined with --{name.replace('_', '-')}, which defines the test split",
            )
        return given

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("table: pass the column of either texts (--text) or images (--image)")
        for path in self.files:
            columns = parquet_columns(path) if _is_parquet(path) else open_records(path).columns
            missing = [name for name in self._columns if name not in (columns or self._columns)]
            if missing:
                raise ValueError(
                    f"{path}: column {missing[0]!r} does not exist: choose from "
                    f"{', '.join(columns or ())[:200]}"
                )
            if self.split_from_name and split_in_name(path.name) is None:
                words = ", ".join(SPLIT_OF_WORD)
                raise ValueError(
                    f"{path}: its name does not contain a split ({words}): rename the file, or "
                    "omit --split-from-name"
                )
        _ = self._label_names  # raises an error if the names differ between files

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return "image" if self.text is None else "text"

    def describe(self) -> SourceInfo:
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
        if self.split_from_name:
            parameters["split_from_name"] = True
        if self.image is not None:
            parameters |= {
                "root": str(self._root),
                "short_side": self.target_side,
                "quality": self.quality,
                "skip_bad": self.skip_bad,
            }
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self._selection.labels)

    def render(self, task: Task) -> Sample | Skipped:
        fields = self.record_file(task.file).read(task.offset, task.length)
        content = text_field(fields, self._content) or ""
        key = f"{task.file:x}-{task.offset:x}"
        if self.text is not None:
            return Sample(key, content.encode(), "txt", task.label)
        name, folder, at = self._image_name(task.file, fields)
        try:
            if at is not None:
                data = read_image(self.local_file(task.file), at)
            else:
                data = self._image_path(content).read_bytes()
            image = self.packed(data)
        except (ValueError, FileNotFoundError) as error:
            if self.skip_bad:
                return Skipped(name, str(error))
            raise ValueError(
                f"{folder / name}: {error}: correct the row, or pass --skip-bad"
            ) from error
        return Sample(key, image.data, image.extension, task.label, image.repaired)

    def example(self, task: Task) -> str:
        if self.text is not None:
            return super().example(task)
        fields = self.record_file(task.file).read(task.offset, task.length)
        return self._image_name(task.file, fields)[0]

    def _image_name(
        self, file: int, fields: dict[str, Any]
    ) -> tuple[str, InputPath, Sequence[int] | None]:
        """Return the name of an image, its folder, and its location if a table contains it."""
        path = self.files[file]
        at = fields.get(BYTES_AT) if _is_parquet(path) else None
        if at is not None:
            return f"{path.name}, row {at[2]}", path.parent, at
        return (text_field(fields, self._content) or "").strip(), self._root, None

    def spans(self) -> list[Span]:
        records = [self.record_file(number) for number in range(len(self.files))]
        return record_spans(records, SPAN_BYTES)

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        one = self.record_file(span.file)
        for offset, data in one.records(span.first, span.last):
            counts["rows read"] += 1
            try:
                fields = one.parse(data)
                content, label = text_field(fields, self._content), text_field(fields, self.label)
                split = self._split_of(span.file, fields)
                if label is not None and self._label_names is not None:
                    label = named_label(label, self._label_names)
            except ValueError as error:
                where = self._location(span.file, offset)
                raise ValueError(f"{where}: the row {error}: correct it") from error
            if not (content or "").strip() or not (label or "").strip():
                counts["rows without text, path or label skipped"] += 1
                continue
            assert content is not None
            assert label is not None
            yield LabeledText(offset, len(data), content, label.strip(), split)

    def _location(self, file: int, offset: int) -> str:
        """Return the file and the position of a record: its row in Parquet, otherwise its byte."""
        if not _is_parquet(self.files[file]):
            return f"{self.files[file]}, byte {offset}"
        return f"{self.files[file]}, row {row_at(self.local_file(file), offset)}"

    def _split_of(self, file: int, fields: dict[str, Any]) -> str | None:
        if self.split_from_name:
            return split_in_name(self.files[file].name)
        if self.split is None:
            return None
        name = (text_field(fields, self.split) or "").strip().lower()
        if not name.isidentifier():
            raise ValueError(f"names an invalid split, {shown(name)}")
        return split_name(name)

    def _choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the labels in the order of the names in the table. Without names, they are sorted
        by number if all labels are numbers, otherwise by name.
        """
        names = [name for name in samples if samples[name] >= self.min_count]
        if untrained := sorted(name for name in names if not trained[name]):
            if self.split is not None or self.split_from_name:
                raise ValueError(
                    f"{self.files[0]}: class {shown(untrained[0])} has no training rows: add "
                    "some, or remove the class"
                )
            names = [name for name in names if trained[name]]
        if len(names) < 2:
            raise ValueError(
                f"{self.files[0]}: column {self.label!r} has {len(names)} classes with "
                f"{self.min_count} or more rows: at least 2 are required"
            )
        if self._label_names is not None:
            return [name for name in self._label_names if name in set(names)]
        return label_order(names)

    @cached_property
    def _label_names(self) -> list[str] | None:
        """The names of numbered labels, as the datasets library stores them in Parquet."""
        of_file = {
            path: class_label_names(path, self.label) if _is_parquet(path) else None
            for path in self.files
        }
        first, names = next(iter(of_file.items()))
        for path, others in of_file.items():
            if others != names:
                raise ValueError(
                    f"{path}: the class names of column {self.label!r} differ from those in "
                    f"{first}: pass tables of the same data set"
                )
        return names

    def _image_path(self, content: str) -> InputPath:
        name = content.strip()
        if isinstance(self._root, RemotePath):
            name = name.removeprefix(f"{self._root}/")
        if name.lower().startswith(_URLS):
            raise ValueError(
                f"is a URL outside {self._root}, which kway does not download: pass the folder of "
                "the images as --root, or fetch them and pass the column that contains them"
            )
        name = os.path.normpath(name)
        if os.path.isabs(name) or name.split(os.sep)[0] == os.pardir:
            raise ValueError(
                f"{shown(content)} is outside {self._root}: move the image into this "
                "folder, or pass another --root"
            )
        return self._root / name

    @property
    def _content(self) -> str:
        name = self.image if self.text is None else self.text
        assert name is not None
        return name

    @property
    def _columns(self) -> list[str]:
        return [name for name in (self._content, self.label, self.split) if name is not None]

    @property
    def _root(self) -> InputPath:
        return self.files[0].parent if self.root is None else self.root

    def local_file(self, number: int) -> Path:
        path = self.files[number]
        if not _is_parquet(path):
            return super().local_file(number)
        rows = self.work / f"rows-{number:06d}.jsonl"
        return made_once(rows, lambda: parquet_as_jsonl(path, self._columns, self.image, rows))

    @property
    def pass_workers(self) -> int | None:
        return self.workers

    def pass_files(self) -> tuple[InputPath, ...]:
        return self.files

    def pass_rules(self) -> SelectionRules:
        return SelectionRules(
            self._choose,
            self.test_fraction,
            drop_duplicates=self.duplicates == "drop",
            drop_across=self.across == "drop",
        )


def _reject(fields: Collection[str], why: str) -> None:
    if fields:
        names = sorted(f"--{name.replace('_', '-')}" for name in fields)
        raise ValueError(f"{', '.join(names)}: {why}")


def _is_parquet(path: InputPath) -> bool:
    return path.suffix.lower() == PARQUET

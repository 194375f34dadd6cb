"""Datasets that `datasets.load_dataset` opens: of the Hub, or local files and image folders.

The library converts them to Arrow files in its cache, which are memory-mapped: every worker process
reads single rows from them. It does not run the code of a dataset.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import one_line
from data.option import Argument, Option, Supplied
from data.shards.split_names import SPLIT_OF_WORD, split_name
from data.skipped import Skipped
from data.sources.first_pass import FirstPassSource
from data.sources.names import class_name, joined_names
from data.sources.packing import PackedImages
from data.sources.records import digest
from data.sources.rows import Row, Task
from data.sources.source import STRICT, HeldOutByHash, Modality, Sample

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".jsonl": "json"}


@dataclass(frozen=True, config=STRICT)
class HuggingFace(PackedImages, FirstPassSource, HeldOutByHash):
    """A dataset of the Hugging Face Hub, or a local folder or file that `datasets` opens.

    Images are stored as `imagefolder` stores them, and texts unchanged. The names of a
    ClassLabel are the classes; otherwise, the values of the label column are.
    """

    kind = "hf"
    reads = "whatever `datasets.load_dataset` opens (extra hf)"
    held_out = "all splits except train, or --test-fraction of the rows if there is only one split"

    name: Annotated[
        str,
        Argument(),
        Field(description="name on the Hub, such as ylecun/mnist, or a local folder or file"),
    ]
    work: Annotated[Path, Supplied()]
    config: str | None = Field(default=None, description="configuration of the dataset")
    revision: str | None = Field(default=None, description="revision on the Hub")
    image_column: str | None = Field(
        default=None, description="column that contains the image; default: the only one"
    )
    text_column: str | None = Field(default=None, description="column that contains the text")
    label_column: str | None = Field(
        default=None, description="column that contains the label; default: the only ClassLabel"
    )
    label_sets: Annotated[bool, Option("--label-sets", flag=True)] = Field(
        default=False,
        description="store a set of labels for each row, from a --label-column of lists",
    )

    def __post_init__(self) -> None:
        if self.image_column is not None and self.text_column is not None:
            raise ValueError("hf: pass either --image-column or --text-column")

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return "image" if self.text_column is None else "text"

    def parameters(self) -> dict[str, Any]:
        content = hashlib.sha256(json.dumps([self._stored, "ordered by a hash"]).encode())
        for split, rows in self._rows.items():
            content.update(repr((split, len(rows), self._version(split))).encode())
            content.update(json.dumps(self._labels[split]).encode())
        parameters: dict[str, Any] = {
            "name": Path(self.name).name if Path(self.name).exists() else self.name,
            "config": self.config,
            "revision": self.revision,
            "content": content.hexdigest()[:16],
            "column": self._content,
            "label": self._label,
            "test_fraction": self.test_fraction,
        }
        if self.modality == "image":
            parameters |= {"short_side": self.target_side, "quality": self.quality}
        if self.label_sets:
            parameters["label_sets"] = True
        return parameters

    @property
    def has_sets(self) -> bool:  # type: ignore[override]
        return self.label_sets

    def _version(self, split: str) -> str:
        """Return a text that changes with the files of the dataset."""
        path = Path(self.name)
        if path.exists():
            return digest(sorted(one for one in [path, *path.rglob("*")] if one.is_file()))
        # The name of the folder in the cache contains the commit of the dataset.
        return ",".join(
            sorted(Path(f["filename"]).parent.name for f in self._rows[split].cache_files)
        )

    def render(self, task: Task) -> Sample | Skipped:
        split, _, row = task.content.decode().rpartition(" ")
        content = self._rows[split][int(row)][self._content]
        where = f"{self.name}, split {split}, row {row}"
        fix = "correct the row, or pass --skip-bad"
        if self.modality == "text":
            if content is None or not str(content).strip():
                return self.bad_sample(where, "there is no text", where=where, fix=fix)
            return Sample(task.key, str(content).encode(), "txt", task.label)

        def read() -> bytes:
            if content is None:
                raise ValueError("there is no image")
            return content["bytes"] or Path(content["path"]).read_bytes()

        return self.image_sample(task.key, task.label, read, name=where, where=where, fix=fix)

    def without_splits(self) -> str | None:
        return None if len(self._used) > 1 else f"the only split is {self._used[0]!r}"

    def notes(self) -> list[str]:
        """Return also one line for each split with rows without a label."""
        return super().notes() + [
            f"split {split!r}: {labels.count(None):,} rows without a label are skipped"
            for split, labels in self._labels.items()
            if None in labels
        ]

    def rows(self) -> Iterator[Row]:
        for file, (split, labels) in enumerate(self._labels.items()):
            given = split_name(split) if len(self._used) > 1 else None
            key = split.replace(".", "_")  # a dot would begin the extension of the file
            for row, label in enumerate(labels):
                if label is not None:
                    content = f"{split} {row}".encode()
                    name, spelling = (
                        joined_names(label) if self.label_sets else (class_name(label), label)
                    )
                    yield Row(file, row, f"{key}-{row}", content, name, spelling, given)

    @property
    def input(self) -> object:
        return self.name

    def where(self, file: int, position: int) -> str:
        return f"{self.name}, split {[*self._labels][file]}, row {position}"

    def choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the classes, in the order of a ClassLabel."""
        names = super().choose(samples, trained)
        if self._stored is None:
            return names
        return [name for name in dict.fromkeys(map(class_name, self._stored)) if name in samples]

    @cached_property
    def _used(self) -> list[str]:
        """The splits of the dataset that have labels."""
        return [split for split, labels in self._labels.items() if any(labels)]

    @cached_property
    def _labels(self) -> dict[str, list[Any]]:
        """The label of each row by split, as stored, or None without a label. With sets of labels,
        the list of its labels, or None if the column is empty.
        """
        stored = self._stored

        def label(value: Any) -> str | None:
            if stored is not None:
                # The rows of an unlabeled split have a negative number.
                return None if value is None or value < 0 else stored[value]
            text = None if value is None else str(value)
            return text if text and class_name(text) else None

        found: dict[str, list[Any]] = {}
        for split, rows in self._rows.items():
            values = rows.with_format(None)[self._label][:]
            if self.label_sets:
                sets = [None if value is None else map(label, value) for value in values]
                found[split] = [None if one is None else [*filter(None, one)] for one in sets]
            else:
                found[split] = [label(value) for value in values]
        return found

    @cached_property
    def _stored(self) -> list[str] | None:
        """The names of a ClassLabel. Raises ValueError for lists without --label-sets and for
        other columns with it, and for names of splits.
        """
        feature = self._features[self._label]
        is_list = type(feature).__name__ in ("List", "LargeList", "Sequence")
        if is_list and self.label_sets:
            feature = feature.feature
        kind = type(feature).__name__
        if kind not in ("ClassLabel", "Value") or is_list != self.label_sets:
            raise ValueError(
                f"{self.name}: column {self._label!r} has the type {kind}: pass a --label-column "
                "with one label per row or, with --label-sets, one that contains lists"
            )
        stored = feature.names if kind == "ClassLabel" else None
        words = {*SPLIT_OF_WORD, *self._rows}
        if stored and all(str(name).lower() in words for name in stored):
            raise ValueError(
                f"{self.name}: the labels {', '.join(stored)} are the names of splits, because the "
                "split folders do not contain class folders: add class folders, or write a table "
                "(docs/layouts.md)"
            )
        return stored

    @cached_property
    def _content(self) -> str:
        """The column of the images or texts."""
        given = self.text_column or self.image_column
        return self._column(given, self._of_kind("Image"), "--image-column or --text-column")

    @cached_property
    def _label(self) -> str:
        found = self._of_kind("ClassLabel") or ["label"] * ("label" in self._features)
        return self._column(self.label_column, found, "--label-column")

    def _column(self, given: str | None, found: list[str], option: str) -> str:
        """Return the given column, or else the only one in `found`."""
        if given is not None and given not in self._features:
            problem = f"column {given!r} does not exist"
        elif given is None and len(found) != 1:
            problem = f"pass the column as {option}"
        else:
            return given or found[0]
        raise ValueError(f"{self.name}: {problem}: choose from {', '.join(self._features)}")

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name, one in self._features.items() if type(one).__name__ == kind]

    @property
    def _features(self) -> dict[str, Any]:
        return dict(next(iter(self._opened.values())).features)

    @cached_property
    def _opened(self) -> dict[str, Any]:
        """The splits of the dataset by name. Raises ValueError if the library cannot open it."""
        import datasets  # not installed without the extra

        path = Path(self.name)
        options: dict[str, Any] = {"name": self.config, "revision": self.revision}
        if path.is_file():
            builder = _BUILDERS.get(path.suffix.lower(), "")
            found, options = builder, {"data_files": str(path.resolve())}
            if not builder:
                known = ", ".join(_BUILDERS)
                raise ValueError(f"{path} has an unsupported extension: pass one of {known}")
        else:
            found = str(path.resolve()) if path.is_dir() else self.name
        datasets.disable_progress_bars()
        try:
            opened = datasets.load_dataset(found, **options)
        except Exception as error:  # the library raises arbitrary errors for damaged files
            raise ValueError(
                f"{self.name} cannot be opened ({one_line(error)}): check the name and --config, "
                "or download it and pass the folder"
            ) from error
        return dict(opened)

    @cached_property
    def _rows(self) -> dict[str, Any]:
        """The splits with the columns that are used. Images are not decoded."""
        import datasets

        rows = {}
        for split, opened in self._opened.items():
            chosen = opened.select_columns([self._content, self._label])
            if self.modality == "image":
                chosen = chosen.cast_column(self._content, datasets.Image(decode=False))
            rows[split] = chosen
        return rows

    def __getstate__(self) -> dict[str, Any]:
        # Workers open the Arrow files by their paths.
        return {**super().__getstate__(), "_rows": self._rows, "_content": self._content}

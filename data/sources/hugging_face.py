"""Datasets that `datasets.load_dataset` opens: of the Hub, or local Parquet files and image
folders.

The library converts them to Arrow files in its cache, which are memory-mapped: every worker process
reads single rows from them. It does not run the code of a dataset.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.messages import one_line, shown
from data.option import Argument
from data.shards.manifest import SourceInfo
from data.shards.split_names import SPLIT_OF_WORD, TEST, TRAIN, shard_splits, split_name
from data.skipped import Skipped
from data.sources.names import class_name, spelling_notes
from data.sources.packing import PackedImages
from data.sources.selection import content_hash
from data.sources.source import STRICT, Modality, Sample, Source
from data.tars.labels import label_order
from data.text.records import digest

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".jsonl": "json"}


class _Task(NamedTuple):
    split: str  # the name in the dataset
    row: int
    label: int


@dataclass(frozen=True, config=STRICT)
class HuggingFace(PackedImages, Source):
    """A dataset of the Hugging Face Hub, or a local folder or file that `datasets` opens.

    Images are stored just as `imagefolder` stores them, and texts unchanged. The names of a
    ClassLabel are the classes; otherwise, the values of the label column are.
    """

    kind = "hf"
    reads = "whatever `datasets.load_dataset` opens (extra hf)"
    held_out = "all splits except train, or --test-fraction of the rows if there is only one split"
    compares_splits = True

    name: Annotated[
        str,
        Argument(),
        Field(description="name on the Hub, such as ylecun/mnist, or a local folder or file"),
    ]
    config: str | None = Field(default=None, description="configuration of the dataset")
    revision: str | None = Field(default=None, description="revision on the Hub")
    image_column: str | None = Field(
        default=None, description="column that contains the image; default: the only one"
    )
    text_column: str | None = Field(default=None, description="column that contains the text")
    label_column: str | None = Field(
        default=None, description="column that contains the label; default: the only ClassLabel"
    )
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        kw_only=True,
        description="fraction of rows to hold out if there is only one split, by a hash of their "
        "numbers",
    )

    def __post_init__(self) -> None:
        if self.image_column is not None and self.text_column is not None:
            raise ValueError("hf: pass either --image-column or --text-column")

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return "image" if self.text_column is None else "text"

    def describe(self) -> SourceInfo:
        content = hashlib.sha256(json.dumps(self._all_names).encode())
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
        return SourceInfo(kind=self.kind, parameters=parameters)

    def _version(self, split: str) -> str:
        """Return a text that changes with the files of the dataset."""
        path = Path(self.name)
        if path.exists():
            return digest(sorted(one for one in [path, *path.rglob("*")] if one.is_file()))
        # The name of the folder in the cache contains the commit of the dataset.
        return ",".join(
            sorted(Path(f["filename"]).parent.name for f in self._rows[split].cache_files)
        )

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self._class_names)

    def splits(self) -> dict[str, Sequence[_Task]]:
        label = {name: i for i, name in enumerate(self._class_names)}
        return {
            split: [_Task(original, row, label[name]) for original, row, name in rows]
            for split, rows in self._labeled.items()
        }

    def render(self, task: _Task) -> Sample | Skipped:
        # A dot would begin the extension of the file.
        key = f"{task.split.replace('.', '_')}-{task.row}"
        content = self._rows[task.split][task.row][self._content]
        where = f"{self.name}, split {task.split}, row {task.row}"
        fix = "correct the row, or pass --skip-bad"
        if self.modality == "text":
            if content is None or not str(content).strip():
                return self.bad_sample(where, "there is no text", where=where, fix=fix)
            return Sample(key, str(content).encode(), "txt", task.label)

        def read() -> bytes:
            if content is None:
                raise ValueError("there is no image")
            return content["bytes"] or Path(content["path"]).read_bytes()

        return self.image_sample(key, task.label, read, name=where, where=where, fix=fix)

    def announcement(self) -> str | None:
        if len(self._used) > 1 or not self.test_fraction:
            return None
        return (
            f"random split, because the only split is {self._used[0]!r}: {self.test_fraction:.0%} "
            "of the rows, by a hash of their numbers, become `test`"
        )

    def notes(self) -> list[str]:
        """Return one line for each split with rows without a label, and for similar class names."""
        notes = [
            f"split {split!r}: {names.count(None):,} rows without a label are skipped"
            for split, names in self._labels.items()
            if None in names
        ]
        spellings: defaultdict[str, set[str]] = defaultdict(set)
        for spelling in {one for found in self._spellings.values() for one in found if one}:
            spellings[class_name(spelling)].add(spelling)
        return notes + spelling_notes(spellings, self._class_names)

    @cached_property
    def _class_names(self) -> list[str]:
        trained = {name for _, _, name in self._labeled.get(TRAIN, ())}
        present = {name for rows in self._labeled.values() for _, _, name in rows}
        if untrained := sorted(present - trained):
            raise ValueError(
                f"{self.name}: class {shown(untrained[0])} has no training rows: pass another "
                "--label-column or a smaller --test-fraction"
            )
        if len(trained) < 2:
            raise ValueError(
                f"{self.name}: column {self._label!r} has {len(trained)} classes: at least 2 are "
                "required"
            )
        return [name for name in self._all_names if name in trained]

    @cached_property
    def _used(self) -> list[str]:
        """The splits of the dataset that have labels."""
        return [split for split, names in self._labels.items() if any(names)]

    @cached_property
    def _labeled(self) -> dict[str, list[tuple[str, int, str]]]:
        """For each split in the shards, the labeled rows: split, row and class name."""
        in_shards = shard_splits(map(split_name, self._used))
        found: defaultdict[str, list[tuple[str, int, str]]] = defaultdict(list)
        for original in self._used:
            split = in_shards[split_name(original)]
            for row, name in enumerate(self._labels[original]):
                if name is None:
                    continue
                if len(self._used) == 1:
                    high, _ = content_hash(f"{original} {row}".encode())
                    split = TEST if high < self.test_fraction * 2.0**64 else TRAIN
                found[split].append((original, row, name))
        return dict(found)

    @cached_property
    def _labels(self) -> dict[str, list[str | None]]:
        """The class name of each row by split, or None without a label."""
        return {
            split: [class_name(one or "") or None for one in found]
            for split, found in self._spellings.items()
        }

    @cached_property
    def _all_names(self) -> list[str]:
        """The class names, in order, including those without rows."""
        if self._stored is not None:
            return list(dict.fromkeys(map(class_name, self._stored)))
        return label_order({name for names in self._labels.values() for name in names if name})

    @cached_property
    def _spellings(self) -> dict[str, list[str | None]]:
        """The label of each row by split, as stored, or None without a label."""
        found = {}
        for split, rows in self._rows.items():
            values = rows.with_format(None)[self._label][:]
            if (stored := self._stored) is not None:
                # The rows of an unlabeled split have a negative number.
                found[split] = [None if v is None or v < 0 else stored[v] for v in values]
            else:
                found[split] = [None if v is None else str(v) for v in values]
        return found

    @cached_property
    def _stored(self) -> list[str] | None:
        """The names of a ClassLabel. Raises ValueError for lists, and for names of splits."""
        feature = self._features[self._label]
        kind = type(feature).__name__
        if kind not in ("ClassLabel", "Value"):
            raise ValueError(
                f"{self.name}: column {self._label!r} has the type {kind}: pass a --label-column "
                "with one label per row"
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

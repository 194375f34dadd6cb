"""Shards from the samples of a user's own generator.

from data.sources.generated import LabeledSample, write_shards

def samples():
    for path in Path("photos").glob("*.jpg"):
        yield LabeledSample(path.read_bytes(), label=path.stem.split("-")[0])

write_shards(samples(), "shards/photos", original=True)
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.dataclasses import dataclass

from data.messages import Report, shown, silent
from data.shards.manifest import Manifest
from data.shards.split_names import checked_split
from data.shards.writing import writer
from data.shards.writing.output import OutputFolder
from data.skipped import Skipped
from data.sources.first_pass import FirstPassSource, work_folder
from data.sources.names import class_name, joined_names
from data.sources.packing import PackedImages
from data.sources.rows import Row, Task
from data.sources.source import STRICT, HeldOutByHash, Modality, Sample


class LabeledSample(NamedTuple):
    """A sample with the name of its class or, with sets of labels, those of its classes. content:
    an image file as bytes, or a text.

    split: its split; without one, a hash of the content chooses `train` or `test`. hierarchy: the
    names of the nodes above its class, joined by " > ".
    """

    content: bytes | str
    label: str | Collection[str]
    split: str | None = None
    hierarchy: str | None = None


def write_shards(
    samples: Iterable[LabeledSample | tuple[Any, ...]],
    out: Path | str,
    *,
    modality: Modality = "image",
    samples_per_shard: int = 10_000,
    test_fraction: float = 0.1,
    label_sets: bool = False,
    workers: int | None = None,
    report: Report = silent,
    **packing: Any,
) -> Manifest:
    """Write `samples` to a local folder or to an s3:// or gs:// URL, and return the manifest.

    The samples are read once, in order, and stored next to the shards until these are written in a
    shuffled order. The same samples give the same bytes. Samples may be plain tuples with the
    fields of `LabeledSample`.

    test_fraction: the fraction of the samples without a split to hold out. label_sets: whether each
    label is a list or a set of class names, which may be empty. workers: the number of processes
    that pack images. packing: `short_side`, `quality`, `original` and `skip_bad`, as for `kway
    shard imagefolder`. Raises ValueError for content of the other modality, for the same image with
    two labels, for fewer than two classes, and for a bad image without `skip_bad`.
    """
    folder = OutputFolder(str(out)).folder
    source = _Generated(
        samples,
        work_folder(folder),
        modality,
        has_sets=label_sets,
        test_fraction=test_fraction,
        **packing,
    )
    try:
        return writer.write_shards(
            source,
            folder,
            samples_per_shard=samples_per_shard,
            workers=workers,
            report=report,
        ).manifest
    finally:
        source.clean_up()


@dataclass(frozen=True, config=STRICT)
class _Generated(PackedImages, FirstPassSource, HeldOutByHash):
    kind = "generated"

    samples: Any
    work: Path
    modality: Modality  # type: ignore[misc]
    report: Report = silent
    has_sets: bool = False

    def parameters(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self._selected.labels).encode())
        for split, tasks in super().splits().items():
            digest.update(split.encode())
            for task in tasks:
                digest.update(repr((task.key, task.label)).encode() + task.content)
        parameters: dict[str, Any] = {
            "content": digest.hexdigest()[:16],
            "test_fraction": self.test_fraction,
        }
        if self.modality == "image":
            parameters |= {"short_side": self.target_side, "quality": self.quality}
        return parameters

    def render(self, task: Task) -> Sample | Skipped:
        if self.modality == "text":
            return Sample(task.key, task.content, "txt", task.label)
        name, fix = f"sample {int(task.key)}", "correct it, or pass skip_bad=True"
        return self.image_sample(
            task.key, task.label, lambda: task.content, name=name, where=name, fix=fix
        )

    def without_splits(self) -> None:
        return None  # a program knows whether its samples have splits

    def where(self, file: int, position: int) -> str:
        return f"sample {position}"

    def rows(self) -> Iterator[Row]:
        kind = str if self.modality == "text" else bytes
        for number, one in enumerate(self.samples):
            content, label, split, path = LabeledSample(*one)
            is_name = isinstance(label, str)
            is_set = isinstance(label, Collection) and all(isinstance(one, str) for one in label)
            if not (is_set and not is_name and path is None if self.has_sets else is_name):
                raise ValueError(
                    f"sample {number} has the label {shown(label)}: with label_sets=True, pass a "
                    "list of names and no hierarchy; otherwise, pass one name"
                )
            if isinstance(label, str):
                name, spelling = class_name(label), label
            else:
                name, spelling = joined_names(label)
            if not isinstance(content, kind) or not content or not (name or self.has_sets):
                raise ValueError(
                    f"sample {number}: the content {shown(content)} and the label {shown(label)} "
                    f"must be non-empty {kind.__name__} and str for modality {self.modality!r}"
                )
            data = content.encode() if isinstance(content, str) else content
            given = None if split is None else checked_split(split)
            yield Row(0, number, f"{number:08d}", data, name, spelling, given, None, path)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "samples": ()}

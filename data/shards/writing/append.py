"""Appends the samples of a source to existing shards, as a new generation of the set.

The new shards are first written to a folder inside the set, `append-2` for generation 2, in the
same way as any other shards (`writer.py`), so an interrupted append can be resumed. They are then
renamed into the set, next to the existing shards, and the new manifest replaces the old one.
Existing shards, indices and label vectors are not changed, so the earlier generations, which the
manifest lists, remain readable. A file without a manifest entry is ignored.
"""

import fcntl
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.files import TEMPORARY, commit, sync
from data.messages import Report, silent
from data.remote.config import is_url
from data.shards.index import index_path
from data.shards.manifest import MANIFEST, ClassInfo, Generation, Manifest, SourceInfo
from data.shards.split_names import TRAIN
from data.shards.writing.claim import lock
from data.shards.writing.output import output_folder
from data.shards.writing.writer import Existing, Written, description, write_shards
from data.skipped import REPAIRED, SKIPPED, Skipped
from data.sources.label_vectors import WithLabelVectors
from data.sources.source import Modality, Sample, Source
from data.tars.indexing import INDEXED

_LOCK = "append.lock"
_BASE = "appended_to"


def append_shards(
    source: Source,
    folder: Path | str,
    *,
    samples_per_shard: int = 10_000,
    workers: int | None = None,
    ray: str | None = None,
    drop_duplicates: bool = False,
    ignored: Sequence[Skipped] = (),
    report: Report = silent,
) -> Written:
    """Append `source` to the shards in `folder`, or resume an earlier call.

    Classes are identified by their names: existing classes keep their labels, and new ones are
    added at the end of the class list. The arguments are those of `write_shards`, except that
    `drop_duplicates` also compares with the existing evaluation splits. If the set already contains
    this source, nothing is written.

    If the source is `WithLabelVectors`, the new generation has vectors of all classes from its
    file. Otherwise, it keeps the existing vectors.

    Raises ValueError, and changes nothing, if `folder` is being written, was created by `kway shard
    index` or has another modality, or if it has label vectors and the source adds classes without
    vectors. Also raises the errors of `Manifest.load` and `write_shards`.
    """
    folder = _local(folder)
    with _locked(folder):
        base = appendable(folder)
        for number in range(2, base.generation + 1):
            shutil.rmtree(_stage(folder, number), ignore_errors=True)  # of a killed process
        about = description(source, samples_per_shard, drop_duplicates=drop_duplicates)
        if _of_samples(about) in map(_of_samples, base.sources):
            return Written(base, complete_before=True)
        addition = _Addition(source, folder, base)
        addition.check()
        stage = _stage(folder, base.generation + 1)
        _restore(folder, base, stage)
        written = write_shards(
            addition,
            stage,
            samples_per_shard=samples_per_shard,
            workers=workers,
            ray=ray,
            drop_duplicates=drop_duplicates,
            ignored=ignored,
            report=report,
            existing=_existing(folder, base),
        )
        manifest = _publish(folder, base, stage, written.manifest, about)
    return replace(
        written,
        manifest=manifest,
        complete_before=False,
        skipped=written.skipped and folder / SKIPPED,
        repaired=written.repaired and folder / REPAIRED,
        notes=addition.notes(),
    )


def appendable(folder: Path | str) -> Manifest:
    """Return the manifest of a set to which samples can be appended.

    Raises the errors of `Manifest.load`, and ValueError for a URL or for tars that kway did not
    write.
    """
    folder = _local(folder)
    manifest = Manifest.load(folder)
    if manifest.source.kind == INDEXED:
        raise ValueError(
            f"{folder} was created by kway shard index, so samples cannot be appended to it: write "
            "them to another folder, and list both in data.mixture"
        )
    return manifest


def _local(folder: Path | str) -> Path:
    if is_url(folder):
        raise ValueError(
            f"{folder} is a URL, but samples can be appended only to a local folder: append them "
            "to a local copy, and upload the new files and then manifest.json"
        )
    return Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for one append. Raises the errors of `lock` and `Manifest.read`."""
    if not (folder / MANIFEST).is_file():
        Manifest.read(folder)  # raises an error that states the fix
    path = folder / _LOCK
    with path.open("ab", buffering=0) as held:
        lock(held, path, folder)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            # A forked child also has this file open, so closing it would not release the lock.
            fcntl.flock(held, fcntl.LOCK_UN)


def _stage(folder: Path, generation: int) -> Path:
    return folder / f"append-{generation}"


def _of_samples(about: SourceInfo) -> SourceInfo:
    """Return the description without the options of the writer, which do not add samples."""
    options = ("samples_per_shard", "drop_duplicates")
    parameters = {k: v for k, v in about.parameters.items() if k not in options}
    return SourceInfo(kind=about.kind, parameters=parameters)


def _existing(folder: Path, base: Manifest) -> Existing:
    """Continue the numbers of the existing shards of each split."""
    numbers: dict[str, int] = {}
    for shard in base.shards:
        if found := re.fullmatch(rf"{re.escape(shard.split)}-(\d+)\.tar", shard.file):
            numbers[shard.split] = max(numbers.get(shard.split, 0), int(found[1]) + 1)
    held_out = [shard.file for shard in base.shards if shard.split != TRAIN]
    return Existing(output_folder(folder), numbers, held_out)


def _restore(folder: Path, base: Manifest, stage: Path) -> None:
    """Move the shards that an interrupted `_publish` has moved to `folder` back to `stage`."""
    if not (stage / MANIFEST).is_file():
        return
    existing = {shard.file for shard in base.shards}
    for shard in Manifest.read(stage).shards:
        for path in (stage / shard.file, index_path(stage / shard.file)):
            moved = folder / path.name
            if shard.file not in existing and moved.exists() and not path.exists():
                moved.replace(path)


def _publish(
    folder: Path, base: Manifest, stage: Path, added: Manifest, about: SourceInfo
) -> Manifest:
    """Move the shards in `stage` to `folder`, and commit the manifest of the new generation."""
    vectors = {
        "label_vectors": base.label_vectors,
        "label_vectors_sha256": base.label_vectors_sha256,
    }
    then = Generation(
        source=base.source, shards=len(base.shards), classes=len(base.classes), **vectors
    )
    if added.label_vectors is not None:
        vectors["label_vectors"] = f"label_vectors-{base.generation + 1}.safetensors"
        vectors["label_vectors_sha256"] = added.label_vectors_sha256
    manifest = Manifest(
        format_version=2,
        modality=base.modality,
        source=about,
        classes=added.classes,
        shards=(*base.shards, *added.shards),
        incomplete=base.incomplete,
        earlier=(*base.earlier, then),
        **vectors,
    )
    for shard in added.shards:
        for path in (stage / shard.file, index_path(stage / shard.file)):
            path.replace(folder / path.name)
    if added.label_vectors is not None:
        (stage / added.label_vectors).replace(folder / str(manifest.label_vectors))
    for name in (SKIPPED, REPAIRED):
        _extend_list(folder / name, stage / name)
    sync(folder)
    commit(folder / MANIFEST, manifest.to_bytes())
    shutil.rmtree(stage)
    for path in folder.glob(f"*{TEMPORARY}"):  # of a killed process
        path.unlink()
    return manifest


def _extend_list(path: Path, added: Path) -> None:
    """Add the lines of `added` to the file at `path`, except those that an interrupted call has
    already added.
    """
    before, new = (
        file.read_bytes().splitlines(keepends=True) if file.is_file() else []
        for file in (path, added)
    )
    known = set(before)
    if missing := [line for line in new if line not in known]:
        commit(path, b"".join([*before, *missing]))


@dataclass(frozen=True)
class _Addition:
    """`source` with the labels of the class list of the next generation of the set `base`."""

    source: Source
    folder: Path
    base: Manifest

    @property
    def modality(self) -> Modality:
        return self.source.modality

    def describe(self) -> SourceInfo:
        # The labels and the file names depend on the existing set.
        about = self.source.describe()
        parameters = {**about.parameters, _BASE: self._fingerprint}
        return SourceInfo(kind=about.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        return (*self.base.classes, *self._new_classes)

    def label_vectors(self) -> np.ndarray | None:
        return None if self._with_vectors is None else self._with_vectors.label_vectors()

    def splits(self) -> dict[str, Sequence[Any]]:
        return self.source.splits()

    def render(self, task: Any) -> Sample | Skipped:
        sample = self.source.render(task)
        if isinstance(sample, Skipped):
            return sample
        return replace(sample, label=int(self._labels[sample.label]))

    def check(self) -> None:
        """Raise ValueError if the source does not match the set."""
        if self.modality != self.base.modality:
            raise ValueError(
                f"{self.folder} contains {self.base.modality}s, but the source contains "
                f"{self.modality}s: choose another folder"
            )
        if self._with_vectors is None and self.base.label_vectors is not None and self._new_classes:
            raise ValueError(
                f"{self.folder} has label vectors, but the new class {self._new_classes[0].name!r} "
                "has none: pass --vectors with a file that contains vectors of all classes"
            )
        self.label_vectors()  # raises an error before anything is written

    def notes(self) -> tuple[str, ...]:
        return () if self._with_vectors is None else tuple(self._with_vectors.notes())

    @cached_property
    def _fingerprint(self) -> str:
        return self.base.fingerprint()[:16]

    @cached_property
    def _new_classes(self) -> tuple[ClassInfo, ...]:
        known = set(self.base.class_names)
        return tuple(info for info in self.source.classes() if info.name not in known)

    @cached_property
    def _labels(self) -> np.ndarray:
        """The label in the set of each class of the source, int64 [K]."""
        labels = {info.name: label for label, info in enumerate(self.classes())}
        return np.array([labels[info.name] for info in self.source.classes()], np.int64)

    @cached_property
    def _with_vectors(self) -> WithLabelVectors | None:
        """This source with the vectors of all classes, old and new, from one file.

        Vectors from different files cannot be compared with each other, and neither can those that
        a source computes from its own class list.
        """
        if not isinstance(self.source, WithLabelVectors):
            return None
        return WithLabelVectors(self, self.source.file, self.source.find)

    def __getstate__(self) -> dict[str, Any]:
        # Workers only render samples.
        return {"source": self.source, "_labels": self._labels}

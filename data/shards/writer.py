"""Writes a source to a folder of webdataset shards with indices and a manifest. A run can be
interrupted safely.

Each shard is written atomically, and `manifest.json` is written last. A second identical run
resumes where the first one stopped. The bytes depend only on the source, not on the number of
workers.
"""

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from webdataset.writer import TarWriter

from data.files import commit, flush, sha256_of, temporary_path
from data.loading.order import permuted_index
from data.messages import Report, silent
from data.shards.claim import UNFINISHED, check_same, claimed
from data.shards.duplicates import HeldOut
from data.shards.index import LABEL_EXTENSION, IndexBuilder, index_path, open_index
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import LABEL_VECTORS, MANIFEST, Manifest, ShardInfo, SourceInfo
from data.shards.split_names import TRAIN
from data.skipped import REPAIRED, SKIPPED, Skipped, SkippedFile
from data.sources.source import Sample, Source, num_workers, rendered

_CHOSEN_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Written:
    """The result of a run.

    resumed: the number of shards that already existed. num_skipped: the total number of samples
    that the source skipped. duplicates: the total number of samples dropped from training. skipped:
    the file that lists the skipped samples and the files that the source ignored, or None if there
    are none. repaired: the file that lists the repaired samples, or None. notes: lines about the
    label vectors of an appended set.
    """

    manifest: Manifest
    complete_before: bool = False
    resumed: int = 0
    num_skipped: int = 0
    duplicates: int = 0
    skipped: Path | None = None
    repaired: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Existing:
    """What the writer must know about a set to which its shards will be added.

    numbers: the number of the first new shard of each split. held_out: the shards of the evaluation
    splits, with which training samples are compared.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    held_out: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A shard: positions [start, stop) in the shuffled order of a split."""

    file: str
    split: str
    of_split: Sequence[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def tasks(self) -> Iterator[Any]:
        """Yield the samples in shuffled order, so that a streaming reader gets a mix of all
        classes.

        Positions are permuted in chunks as they are requested, so no list of the entire split is
        built.
        """
        total = len(self.of_split)
        for start in range(self.start, self.stop, _CHOSEN_AT_ONCE):
            positions = np.arange(start, min(start + _CHOSEN_AT_ONCE, self.stop))
            for i in permuted_index(0, 0, positions, total).tolist():
                yield self.of_split[i]


def write_shards(
    source: Source,
    folder: Path,
    *,
    samples_per_shard: int = 10_000,
    workers: int | None = None,
    drop_duplicates: bool = False,
    ignored: Sequence[Skipped] = (),
    report: Report = silent,
    existing: Existing | None = None,
) -> Written:
    """Write `source` to `folder`, or resume an earlier run.

    ignored: files that the source does not read. `skipped.jsonl` lists them along with the bad
    samples. workers: the number of processes; None selects one per core if there is enough work.
    drop_duplicates: whether to remove training samples that are byte-identical to a sample in
    another split; the other splits are then written first. report: a callback that is called as
    `report(done, total)` with sample counts. existing: the set to which the shards will be added.

    Missing or truncated files of a finished folder are written again. Raises ValueError, and
    changes nothing, if the folder contains files other than these shards. A bad sample also raises
    ValueError, and the unfinished shards are removed. A full disk raises OSError; the same call
    resumes once there is space.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}: it must be at least 1")
    existing = existing or Existing()
    about = description(source, samples_per_shard, drop_duplicates=drop_duplicates)
    if (complete := _complete_manifest(folder, about)) is not None:
        (folder / UNFINISHED).unlink(missing_ok=True)
        return Written(complete, complete_before=True, **_lists(folder))
    with claimed(folder, about):
        # The folder is incomplete, so remove its manifest. The file UNFINISHED then marks it.
        (folder / MANIFEST).unlink(missing_ok=True)
        plans = list(_plans(source, samples_per_shard, existing.numbers))
        shards, resumed, duplicates = _write_plans(
            source, folder, plans, workers, report, drop_duplicates, existing.held_out, ignored
        )
        vectors_sha256 = _write_vectors(folder / LABEL_VECTORS, source.label_vectors())
        manifest = Manifest(
            modality=source.modality,
            source=about,
            classes=source.classes(),
            shards=tuple(shards),
            label_vectors=None if vectors_sha256 is None else LABEL_VECTORS,
            label_vectors_sha256=vectors_sha256,
        )
        commit(folder / MANIFEST, manifest.to_bytes())
    planned = sum(len(plan) for plan in plans)
    return Written(
        manifest,
        resumed=resumed,
        num_skipped=planned - duplicates - sum(shard.samples for shard in shards),
        duplicates=duplicates,
        **_lists(folder),
    )


def description(
    source: Source, samples_per_shard: int, *, drop_duplicates: bool = False
) -> SourceInfo:
    """Return the description of the shards that `write_shards` writes."""
    about = source.describe()
    parameters = {**about.parameters, "samples_per_shard": samples_per_shard}
    if drop_duplicates:
        parameters["drop_duplicates"] = True
    return SourceInfo(kind=about.kind, parameters=parameters)


def _lists(folder: Path) -> dict[str, Any]:
    """Return the files that list skipped and repaired samples, if they exist."""
    names = {"skipped": SKIPPED, "repaired": REPAIRED}
    return {what: folder / name for what, name in names.items() if (folder / name).is_file()}


def _write_vectors(path: Path, vectors: np.ndarray | None) -> str | None:
    """Write the vectors and return the SHA-256 of the file. If `vectors` is None, write nothing and
    return None.
    """
    if vectors is None:
        return None
    content = save({"vectors": np.ascontiguousarray(vectors)})
    commit(path, content)
    return hashlib.sha256(content).hexdigest()


def _complete_manifest(folder: Path, about: SourceInfo) -> Manifest | None:
    """Return the manifest if every file that it lists exists with its full size, otherwise None.

    Raises ValueError if a file is missing and samples have been appended since.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    check_same(folder, manifest.sources[0], about)
    if manifest.earlier:
        # Writing the first generation again would remove the manifest of the later ones.
        return Manifest.load(folder)
    if any(_finished(folder / shard.file) != shard for shard in manifest.shards):
        return None
    if manifest.label_vectors is not None:
        try:
            load_label_vectors(folder, manifest)
        except (ValueError, OSError):
            return None
    return manifest


def _plans(
    source: Source, samples_per_shard: int, first_numbers: Mapping[str, int]
) -> Iterator[_Plan]:
    """Yield the shards to write, each with its range of samples. Their numbers start at
    `first_numbers`, or at 0.

    This requires about 100 bytes of memory per shard and none per sample.
    """
    for split, tasks in source.splits().items():
        if split.startswith(".") or "/" in split or "\\" in split:
            raise ValueError(f"split {split!r} would write outside the folder: rename it")
        starts = range(0, len(tasks), samples_per_shard)
        for number, start in enumerate(starts, first_numbers.get(split, 0)):
            stop = min(start + samples_per_shard, len(tasks))
            yield _Plan(f"{split}-{number:06d}.tar", split, tasks, start, stop)


def _write_plans(
    source: Source,
    folder: Path,
    plans: list[_Plan],
    workers: int | None,
    report: Report,
    drop_duplicates: bool,
    existing_held_out: Sequence[Path],
    ignored: Sequence[Skipped],
) -> tuple[list[ShardInfo], int, int]:
    """Return the shards in the order of `plans`, the number of shards that already existed, and all
    duplicates.
    """
    total = sum(len(plan) for plan in plans)
    finished = {plan.file: info for plan in plans if (info := _finished(folder / plan.file))}
    missing = [plan for plan in plans if plan.file not in finished]
    done = total - sum(len(plan) for plan in missing)
    resumed = len(finished)
    skipped = SkippedFile(folder / SKIPPED, finished=finished, ignored=ignored)
    repaired = SkippedFile(folder / REPAIRED, finished=finished)
    duplicates = 0
    held_out: HeldOut | None = None
    if drop_duplicates:
        duplicates = sum(open_index(folder / file).duplicates for file in finished)
        # False sorts first, so the evaluation splits are written before the training split, which
        # is compared with them.
        missing.sort(key=lambda plan: plan.split == TRAIN)
    tasks = (task for plan in missing for task in plan.tasks())
    with rendered(source, tasks, num_workers(workers, total - done)) as samples:
        for plan in missing:

            def count(row: int, done: int = done) -> None:
                report(done + row, total)

            if drop_duplicates and plan.split == TRAIN and held_out is None:
                others = [info.file for info in finished.values() if info.split != TRAIN]
                held_out = HeldOut([*existing_held_out, *(folder / file for file in others)])
            info = _write_shard(
                folder / plan.file, plan, samples, count, held_out, skipped, repaired
            )
            done += len(plan)
            if info is not None:
                finished[plan.file] = info
    if not finished:
        raise ValueError(
            f"no shards were written, because all samples were skipped: {skipped.last}"
        )
    skipped.finish()
    repaired.finish()
    duplicates += held_out.dropped if held_out else 0
    return [finished[plan.file] for plan in plans if plan.file in finished], resumed, duplicates


def _finished(shard: Path) -> ShardInfo | None:
    """Return the info of a finished shard, or None if the shard is not finished.

    The index is renamed last, so its existence implies that the shard is complete.
    """
    try:
        info = open_index(shard).info
    except (ValueError, FileNotFoundError):
        return None  # missing or damaged, so the shard is written again
    return info if shard.is_file() and shard.stat().st_size == info.bytes else None


def _write_shard(
    path: Path,
    plan: _Plan,
    samples: Iterator[Sample | Skipped],
    count: Callable[[int], None],
    held_out: HeldOut | None,
    skipped: SkippedFile,
    repaired: SkippedFile,
) -> ShardInfo | None:
    """Write one tar and its index. If every sample was skipped, write nothing and return None."""
    index = IndexBuilder()
    samples = islice(samples, len(plan))
    dropped_before = held_out.dropped if held_out else 0
    with temporary_path(path) as temporary:
        kept = held_out.without(samples) if held_out else samples
        missing, changed = _write_tar(temporary, index, kept, count)
        skipped.add(path.name, missing)
        repaired.add(path.name, changed)
        if not len(index):
            temporary.unlink()
            return None
        info = ShardInfo(
            file=path.name,
            split=plan.split,
            samples=len(index),
            bytes=temporary.stat().st_size,
            sha256=sha256_of(temporary),
            index_crc32=index.crc32(),
        )
        # The tar is renamed before its index is committed, because the index marks the shard as
        # finished.
        temporary.replace(path)
    duplicates = held_out.dropped - dropped_before if held_out else 0
    commit(index_path(path), index.to_bytes(info, duplicates=duplicates))
    return info


def _write_tar(
    path: Path,
    index: IndexBuilder,
    samples: Iterator[Sample | Skipped],
    count: Callable[[int], None],
) -> tuple[list[Skipped], list[Skipped]]:
    """Write the samples. Return the skipped and the repaired ones."""
    skipped, repaired = [], []
    with path.open("wb") as file:
        with TarWriter(
            file, user="kway", group="kway", mode=0o644, mtime=0, encoder=False
        ) as writer:
            # webdataset documents USTAR but opens the tar in Python's default format. For non-ASCII
            # names, that format adds header blocks, but the index expects a single header block
            # before the content.
            writer.tarstream.format = tarfile.USTAR_FORMAT
            for row, sample in enumerate(samples, start=1):
                if isinstance(sample, Skipped):
                    skipped.append(sample)
                else:
                    _add(writer, index, sample)
                    if sample.repaired is not None:
                        repaired.append(Skipped(sample.key, sample.repaired))
                count(row)
        flush(file)
    return skipped, repaired


def _add(writer: TarWriter, index: IndexBuilder, sample: Sample) -> None:
    members = {sample.extension: sample.data, LABEL_EXTENSION: str(sample.label).encode()}
    offset = writer.tarstream.offset
    writer.write({"__key__": sample.key, **members})
    end = index.add(members, offset=offset, sample=sample.extension, label=sample.label)
    assert writer.tarstream.offset == end

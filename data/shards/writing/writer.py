"""Writes a source to a folder of webdataset shards with indices and a manifest.

Each shard is written atomically, and `manifest.json` is written last. A second identical run
resumes where the first one stopped. The bytes depend only on the source, not on the number of
workers or on whether they are processes of this machine or tasks on a Ray cluster.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import save
from webdataset.writer import TarWriter

from data.files import sha256_of, sync
from data.loading.order import permuted_index
from data.messages import Report, silent
from data.processes import over_jobs
from data.shards.index import LABEL_EXTENSION, IndexBuilder, index_path
from data.shards.manifest import (
    LABEL_VECTORS,
    MANIFEST,
    Manifest,
    ManifestHead,
    ShardInfo,
    SourceInfo,
)
from data.shards.writing.output import UNFINISHED, OutputFolder, check_same
from data.skipped import SKIPPED, Skipped, to_lines
from data.sources.label_vectors import VectorFile
from data.sources.source import Source

_CHOSEN_AT_ONCE = 1 << 14
_TASKS_PER_WORKER = 2_000  # for fewer tasks, starting a process is not worthwhile


class ShuffledTasks:
    """The tasks at the positions [start, stop) of the shuffled order of a split.

    They are shuffled so that a streaming reader gets a mix of all classes. Positions are permuted
    in chunks as they are requested, so no list of the entire split is built.
    """

    def __init__(self, of_split: Sequence[Any], start: int, stop: int) -> None:
        self._of_split, self._start, self._stop = of_split, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[Any]:
        total = len(self._of_split)
        for start in range(self._start, self._stop, _CHOSEN_AT_ONCE):
            positions = np.arange(start, min(start + _CHOSEN_AT_ONCE, self._stop))
            for i in permuted_index(0, 0, positions, total).tolist():
                yield self._of_split[i]

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process needs only these tasks of a list. Other sequences are cheap to pickle,
        # and their tasks may be large.
        if isinstance(self._of_split, list):
            return list, (list(self),)
        return ShuffledTasks, (self._of_split, self._start, self._stop)


class Plan(NamedTuple):
    """A shard to write."""

    file: str
    split: str
    tasks: ShuffledTasks | list[Any]


def plan_shards(source: Source, samples_per_shard: int) -> Iterator[Plan]:
    """Yield the shards to write, each with its range of samples.

    This requires about 100 bytes of memory per shard and none per sample.
    """
    for split, tasks in source.splits().items():
        if split.startswith(".") or "/" in split or "\\" in split:
            raise ValueError(f"split {split!r} would write outside the folder: rename it")
        for number, start in enumerate(range(0, len(tasks), samples_per_shard)):
            stop = min(start + samples_per_shard, len(tasks))
            yield Plan(f"{split}-{number:06d}.tar", split, ShuffledTasks(tasks, start, stop))


class WrittenShard(NamedTuple):
    """The result for one shard.

    info: None if every sample was skipped. skipped: the samples that were skipped.
    """

    info: ShardInfo | None
    skipped: Sequence[Skipped]


def write_plan(source: Source, output: OutputFolder, plan: Plan) -> WrittenShard:
    """Write a planned shard. Worker processes and Ray tasks call this.

    The same call can run twice, even at the same time on different machines: the same samples give
    the same bytes, and each file appears atomically. The index is written last, because it marks
    the shard as finished.
    """
    output.check_shared()
    index, skipped, file = IndexBuilder(), list[Skipped](), plan.file
    with output.staged(file) as staged:
        with (
            staged.open("wb") as opened,
            TarWriter(
                opened, user="kway", group="kway", mode=0o644, mtime=0, encoder=False
            ) as writer,
        ):
            # webdataset documents USTAR but opens the tar in Python's default format. For non-ASCII
            # names, that format adds header blocks, but the index expects a single header block
            # before the content.
            writer.tarstream.format = tarfile.USTAR_FORMAT
            for sample in map(source.render, plan.tasks):
                if isinstance(sample, Skipped):
                    skipped.append(sample)
                    continue
                label = sample.label
                if isinstance(label, Sequence):
                    label = sorted(set(label))
                    content = b" ".join(b"%d" % one for one in label)
                else:
                    content = b"%d" % label
                members = {sample.extension: sample.data, LABEL_EXTENSION: content}
                offset = writer.tarstream.offset
                writer.write({"__key__": sample.key, **members})
                end = index.add(members, offset=offset, sample=sample.extension, label=label)
                assert writer.tarstream.offset == end
        if not len(index):
            return WrittenShard(None, skipped)
        sync(staged)
        info = index.info(file, plan.split, size=staged.stat().st_size, sha256=sha256_of(staged))
        output.put(staged, file)
    output.write(index_path(Path(file)).name, index.to_bytes(info, skipped=skipped))
    return WrittenShard(info, skipped)


@dataclass(frozen=True)
class Written:
    """The result of a run.

    resumed: the number of shards that already existed. num_skipped: the total number of samples
    that the source skipped. skipped: the file that lists the skipped samples and the files that the
    source ignored, or None if there are none.
    """

    manifest: Manifest
    complete_before: bool = False
    resumed: int = 0
    num_skipped: int = 0
    skipped: Path | str | None = None


def write_shards(
    source: Source,
    folder: Path | str,
    *,
    samples_per_shard: int = 10_000,
    workers: int | None = None,
    ray: str | None = None,
    vectors: VectorFile | None = None,
    ignored: Sequence[Skipped] = (),
    report: Report = silent,
) -> Written:
    """Write `source` to a local folder or to an s3:// or gs:// URL, or resume an earlier run.

    vectors: label vectors that replace those of the source. ignored: files that the source does not
    read. `skipped.jsonl` lists them along with the bad samples. workers: the number of processes,
    each of which writes whole shards; None selects one per core if there is enough work. ray: the
    address of a Ray cluster to use instead; a local folder must then be shared by all nodes.
    report: a callback that is called as `report(done, total)` with sample counts after each shard.

    Missing or truncated files of a finished folder are written again. Raises ValueError, and
    changes nothing, if the folder contains files other than these shards. A bad sample also raises
    ValueError, and the unfinished shards are removed. A full disk raises OSError; the same call
    resumes once there is space.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}: it must be at least 1")
    described = source.describe()
    of_vectors = {} if vectors is None else {"vectors": vectors.digest()}
    parameters = {**described.parameters, **of_vectors, "samples_per_shard": samples_per_shard}
    about = SourceInfo(kind=described.kind, parameters=parameters)
    output = OutputFolder(folder)
    if (complete := _complete_manifest(output, about)) is not None:
        output.delete([UNFINISHED])
        return Written(complete, complete_before=True, skipped=_skipped(output))
    if ray is not None:
        from data.ray_pool import ray_cluster

    # Connect to the Ray cluster first: an error while the folder is claimed would discard it.
    with nullcontext() if ray is None else ray_cluster(ray), output.claimed(about):
        # The folder is incomplete, so remove its manifest. The file UNFINISHED then marks it.
        output.delete([MANIFEST])
        plans = list(plan_shards(source, samples_per_shard))
        finished = {
            file: WrittenShard(index.info, index.skipped)
            for file, index in output.finished([plan.file for plan in plans]).items()
        }
        resumed = len(finished)
        missing = [plan for plan in plans if plan.file not in finished]
        planned = sum(len(plan.tasks) for plan in plans)
        done = planned - sum(len(plan.tasks) for plan in missing)
        if workers is None:
            workers = min(len(os.sched_getaffinity(0)), 1 + (planned - done) // _TASKS_PER_WORKER)
        work = partial(write_plan, source, output)
        # The nodes of a Ray cluster may not have the files of the tasks.
        jobs = (plan._replace(tasks=list(plan.tasks)) for plan in missing) if ray else missing
        found = over_jobs(work, jobs, workers=min(workers, len(missing)), ray=ray)
        for plan, shard in zip(missing, found, strict=True):
            if ray is not None and shard.info is not None:
                output.check_visible(shard.info)
            finished[plan.file] = shard
            done += len(plan.tasks)
            report(done, planned)
        written = {plan.file: finished[plan.file] for plan in plans}
        shards = tuple(shard.info for shard in written.values() if shard.info is not None)
        if not shards:
            last = [one for shard in written.values() for one in shard.skipped][-1]
            raise ValueError(f"no shards were written, because all samples were skipped: {last}")
        # On an object store, another run of the same source may have finished in the meantime.
        manifest = _complete_manifest(output, about)
        if manifest is None:
            skipped = [to_lines(ignored)]
            for file, shard in sorted(written.items()):
                skipped.append(to_lines(shard.skipped, shard=file))
            if content := b"".join(skipped):
                output.write(SKIPPED, content)
            else:
                output.delete([SKIPPED])
            classes = source.classes()
            rows = source.label_vectors() if vectors is None else vectors.of(classes)
            vectors_sha256 = _write_vectors(output, rows)
            manifest = Manifest(
                modality=source.modality,
                source=about,
                classes=classes,
                shards=shards,
                label_vectors=None if vectors_sha256 is None else LABEL_VECTORS,
                label_vectors_sha256=vectors_sha256,
            )
            manifest = manifest.in_stored_form(output.write_classes)
            output.write(MANIFEST, manifest.to_bytes())
    return Written(
        manifest,
        resumed=resumed,
        num_skipped=planned - sum(shard.samples for shard in shards),
        skipped=_skipped(output),
    )


def _skipped(output: OutputFolder) -> Path | str | None:
    """Return the file that lists skipped samples, if it exists."""
    return output.location(SKIPPED) if SKIPPED in output.sizes() else None


def _write_vectors(output: OutputFolder, vectors: np.ndarray | None) -> str | None:
    """Write the vectors and return the SHA-256 of the file. If `vectors` is None, write nothing and
    return None.
    """
    if vectors is None:
        return None
    content = save({"vectors": np.ascontiguousarray(vectors)})
    output.write(LABEL_VECTORS, content)
    return hashlib.sha256(content).hexdigest()


def _complete_manifest(output: OutputFolder, about: SourceInfo) -> Manifest | None:
    """Return the manifest if every file that it lists exists with its full size, otherwise None."""
    files = output.sizes()
    if MANIFEST not in files:
        return None
    with suppress(ValidationError):  # the error of `Manifest.read` is better
        listed = ManifestHead.model_validate_json(output.read(MANIFEST)).class_file
        if listed is not None:
            if listed.file not in files:
                return None
            path = output.location(listed.file)
            if isinstance(path, Path) and sha256_of(path) != listed.sha256:
                return None
    manifest = Manifest.read(output.folder)
    check_same(output.folder, manifest.source, about)
    found = output.finished([shard.file for shard in manifest.shards])
    if any(shard.file not in found or found[shard.file].info != shard for shard in manifest.shards):
        return None
    if (name := manifest.label_vectors) is not None:
        path = output.location(name)
        if name not in output.sizes():
            return None
        if isinstance(path, Path) and sha256_of(path) != manifest.label_vectors_sha256:
            return None
    return manifest

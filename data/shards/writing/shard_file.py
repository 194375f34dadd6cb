"""Plans shards, and writes each: a webdataset tar and its index."""

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from webdataset.writer import TarWriter

from data.files import sha256_of, sync
from data.loading.order import permuted_index
from data.shards.index import LABEL_EXTENSION, IndexBuilder, index_path
from data.shards.manifest import ShardInfo
from data.shards.writing.output import OutputFolder
from data.skipped import Skipped
from data.sources.source import Sample, Source

_CHOSEN_AT_ONCE = 1 << 14


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


@dataclass(frozen=True)
class WrittenShard:
    """The result for one shard.

    info: None if every sample was skipped, so there is no shard. skipped: the samples that
    were skipped.
    """

    file: str
    info: ShardInfo | None
    skipped: Sequence[Skipped]


def write_plan(source: Source, output: OutputFolder, plan: Plan) -> WrittenShard:
    """Write a planned shard. Worker processes and Ray tasks call this."""
    output.check_shared()
    return write_shard(output, plan.file, plan.split, map(source.render, plan.tasks))


def write_shard(
    output: OutputFolder, file: str, split: str, samples: Iterable[Sample | Skipped]
) -> WrittenShard:
    """Write the shard `file` with these samples.

    The same call can run twice, even at the same time on different machines: the same samples give
    the same bytes, and each file appears atomically. The index is written last, because it marks
    the shard as finished.
    """
    index, skipped = IndexBuilder(), list[Skipped]()
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
            for sample in samples:
                if isinstance(sample, Skipped):
                    skipped.append(sample)
                    continue
                members = {sample.extension: sample.data, LABEL_EXTENSION: b"%d" % sample.label}
                offset = writer.tarstream.offset
                writer.write({"__key__": sample.key, **members})
                end = index.add(members, offset=offset, sample=sample.extension, label=sample.label)
                assert writer.tarstream.offset == end
        if not len(index):
            return WrittenShard(file, None, skipped)
        sync(staged)
        info = index.info(file, split, size=staged.stat().st_size, sha256=sha256_of(staged))
        output.put(staged, file)
    content = index.to_bytes(info, skipped=skipped)
    output.write(index_path(Path(file)).name, content)
    return WrittenShard(file, info, skipped)

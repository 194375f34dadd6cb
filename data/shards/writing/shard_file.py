"""Writes one shard: a webdataset tar and its index."""

import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from webdataset.writer import TarWriter

from data.files import flush, sha256_of
from data.shards.index import LABEL_EXTENSION, IndexBuilder, index_path
from data.shards.manifest import ShardInfo
from data.shards.writing.output import OutputFolder
from data.skipped import Skipped
from data.sources.source import Sample


@dataclass(frozen=True)
class WrittenShard:
    """The result for one shard.

    info: None if every sample was skipped, so there is no shard. skipped: the samples that
    were skipped.
    """

    file: str
    info: ShardInfo | None
    skipped: Sequence[Skipped]


def write_shard(
    output: OutputFolder, file: str, split: str, samples: Iterable[Sample | Skipped]
) -> WrittenShard:
    """Write the shard `file` with these samples.

    The same call can run twice, even at the same time on different machines: the same samples give
    the same bytes, and each file appears atomically. The index is written last, because it marks
    the shard as finished.
    """
    index = IndexBuilder()
    with output.staged(file) as staged:
        skipped = _write_tar(staged, index, samples)
        if not len(index):
            return WrittenShard(file, None, skipped)
        info = ShardInfo(
            file=file,
            split=split,
            samples=len(index),
            bytes=staged.stat().st_size,
            sha256=sha256_of(staged),
            index_crc32=index.crc32(),
        )
        output.put(staged, file)
    content = index.to_bytes(info, skipped=skipped)
    output.write(index_path(Path(file)).name, content)
    return WrittenShard(file, info, skipped)


def _write_tar(
    path: Path, index: IndexBuilder, samples: Iterable[Sample | Skipped]
) -> list[Skipped]:
    """Write the samples. Return the skipped ones."""
    skipped = []
    with path.open("wb") as file:
        with TarWriter(
            file, user="kway", group="kway", mode=0o644, mtime=0, encoder=False
        ) as writer:
            # webdataset documents USTAR but opens the tar in Python's default format. For non-ASCII
            # names, that format adds header blocks, but the index expects a single header block
            # before the content.
            writer.tarstream.format = tarfile.USTAR_FORMAT
            for sample in samples:
                if isinstance(sample, Skipped):
                    skipped.append(sample)
                else:
                    _add(writer, index, sample)
        flush(file)
    return skipped


def _add(writer: TarWriter, index: IndexBuilder, sample: Sample) -> None:
    members = {sample.extension: sample.data, LABEL_EXTENSION: str(sample.label).encode()}
    offset = writer.tarstream.offset
    writer.write({"__key__": sample.key, **members})
    end = index.add(members, offset=offset, sample=sample.extension, label=sample.label)
    assert writer.tarstream.offset == end

"""Reads all shards of a folder or at a URL, several in parallel, and reports damage.

`data/inspection/shard_check.py` checks a single shard.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from data.inspection.shard_check import Damage, Rules, check_shard
from data.messages import Report, pluralize
from data.processes import over_jobs
from data.remote.config import DEFAULT_CACHE
from data.retry import RetriesExhaustedError
from data.shards.label_vectors import check_label_vectors
from data.shards.manifest import Manifest
from data.skipped import SKIPPED
from data.tars.indexing import INDEXED
from data.tars.labels import ClassList

NAMED_PER_SHARD = 10
_DECODING_COST = 20  # time per byte, relative to reading


def damages(
    folder: Path | str,
    report: Report,
    *,
    manifest: Manifest | None = None,
    decode: bool = False,
    named: int | None = NAMED_PER_SHARD,
    workers: int | None = None,
    ray: str | None = None,
) -> Iterator[Damage]:
    """Yield all damage. `report(done, total)` counts samples.

    manifest: the manifest of the folder, if it is already loaded. decode: whether to
    also decode images. named: the maximum number of samples per shard that are reported on separate
    lines, or None for no limit; the others share one line. workers: the number of processes; None
    selects one per core if there is enough to read. ray: the address of a Ray cluster to use
    instead.

    For a URL, each process downloads one shard at a time to a temporary file, and the cache is not
    used. Raises RetriesExhaustedError if the server cannot be reached.
    """
    manifest = Manifest.read(folder) if manifest is None else manifest
    total = sum(shard.samples for shard in manifest.shards)
    size = sum(shard.bytes for shard in manifest.shards) * (_DECODING_COST if decode else 1)
    work = partial(check_shard, _rules(folder, manifest, decode=decode, named=named))
    done = 0
    found = over_jobs(work, manifest.shards, total_bytes=size, workers=workers, ray=ray)
    for shard, found_here in zip(manifest.shards, found, strict=True):
        yield from found_here
        done += shard.samples
        report(done, total)
    if manifest.label_vectors is not None:
        try:
            check_label_vectors(folder, manifest)
        except RetriesExhaustedError:
            raise
        except (ValueError, OSError) as error:
            yield Damage("label vectors", str(error))


def recorded_losses(folder: Path | str, manifest: Manifest) -> list[str]:
    """Return one line for each loss of samples that `kway shard index` recorded. Such losses do not
    count as damage.
    """
    about = manifest.source.parameters
    lines = [f"{file}: {reason}" for file, reason in manifest.incomplete.items()]
    indexed = sum(shard.samples for shard in manifest.shards)
    expected = about.get("expected_samples", indexed)
    if expected != indexed:
        lines.append(f"{indexed:,} samples are indexed, but {expected:,} were expected")
    if manifest.source.kind == INDEXED and (problems := about.get("left_out")):
        # Earlier versions counted the problems but did not list them in this file.
        listed = not isinstance(folder, str) and (folder / SKIPPED).is_file()
        where = f", listed in {SKIPPED}" if listed else ""
        lines.append(f"{pluralize(int(problems), 'problem')} skipped{where}")
    return lines


def _rules(folder: Path | str, manifest: Manifest, *, decode: bool, named: int | None) -> Rules:
    about = manifest.source.parameters
    classes = None
    if manifest.source.kind == INDEXED:
        classes = ClassList(manifest.class_names, positions=bool(about.get("positions")))
    return Rules(
        folder=folder,
        text=manifest.modality == "text",
        num_classes=len(manifest.classes),
        classes=classes,
        label_field=str(about.get("label_field")),
        file_of_sha256={shard.sha256: shard.file for shard in manifest.shards},
        incomplete=manifest.incomplete,
        decode=decode,
        named=named,
        # Large enough for a copy of any other shard, which is then reported as such.
        max_bytes=2 * max(shard.bytes for shard in manifest.shards),
        attempts=DEFAULT_CACHE.attempts,
    )

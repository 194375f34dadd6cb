"""Writes a source to a folder of webdataset shards with indices and a manifest. A run can be
interrupted safely.

Each shard is written atomically, and `manifest.json` is written last. A second identical run
resumes where the first one stopped. The bytes depend only on the source, not on the number of
workers or on whether they are processes of this machine or tasks on a Ray cluster.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from data.messages import Report, silent
from data.shards.duplicates import HeldOut
from data.shards.manifest import LABEL_VECTORS, MANIFEST, Manifest, ShardInfo, SourceInfo
from data.shards.split_names import TRAIN
from data.shards.writing.claim import UNFINISHED, check_same
from data.shards.writing.output import OutputFolder, output_folder
from data.shards.writing.plans import Plan, Write, plan_shards, shard_writer
from data.skipped import REPAIRED, SKIPPED, Skipped, by_shard, list_of_shard, to_lines
from data.sources.source import Source


@dataclass(frozen=True)
class Written:
    """The result of a run.

    resumed: the number of shards that already existed. num_skipped: the total number of samples
    that the source skipped. duplicates: the total number of samples dropped from training. skipped:
    the file that lists the skipped samples and the files that the source ignored, or None if there
    are none. repaired: the file that lists the repaired samples, or None. num_repaired: the number
    of samples in it. notes: lines about the label vectors of an appended set.
    """

    manifest: Manifest
    complete_before: bool = False
    resumed: int = 0
    num_skipped: int = 0
    duplicates: int = 0
    skipped: Path | str | None = None
    repaired: Path | str | None = None
    num_repaired: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Existing:
    """What the writer must know about a set to which its shards will be added.

    output: the set. numbers: the number of the first new shard of each split. held_out: the files
    of the evaluation splits, with which training samples are compared.
    """

    output: OutputFolder
    numbers: Mapping[str, int]
    held_out: Sequence[str]


def write_shards(
    source: Source,
    folder: Path | str,
    *,
    samples_per_shard: int = 10_000,
    workers: int | None = None,
    ray: str | None = None,
    drop_duplicates: bool = False,
    ignored: Sequence[Skipped] = (),
    report: Report = silent,
    existing: Existing | None = None,
) -> Written:
    """Write `source` to a local folder or to an s3:// or gs:// URL, or resume an earlier run.

    ignored: files that the source does not read. `skipped.jsonl` lists them along with the bad
    samples. workers: the number of processes; None selects one per core if there is enough work.
    ray: the address of a Ray cluster whose tasks write whole shards instead; a local folder must
    then be shared by all nodes. drop_duplicates: whether to remove training samples that are
    byte-identical to a sample in another split; the other splits are then written first. report: a
    callback that is called as `report(done, total)` with sample counts. existing: the set to which
    the shards will be added.

    Missing or truncated files of a finished folder are written again. Raises ValueError, and
    changes nothing, if the folder contains files other than these shards. A bad sample also raises
    ValueError, and the unfinished shards are removed. A full disk raises OSError; the same call
    resumes once there is space.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}: it must be at least 1")
    about = description(source, samples_per_shard, drop_duplicates=drop_duplicates)
    output = output_folder(folder)
    if (complete := _complete_manifest(output, about)) is not None:
        output.delete([UNFINISHED])
        return Written(complete, complete_before=True, **_lists(output))
    # Connect to the Ray cluster first: an error while the folder is claimed would discard it.
    with (
        shard_writer(source, output, workers, ray) as write,
        output.claimed(about) as check_claim,
    ):
        # The folder is incomplete, so remove its manifest. The file UNFINISHED then marks it.
        output.delete([MANIFEST])
        plans = list(plan_shards(source, samples_per_shard, existing.numbers if existing else {}))

        def checked_report(done: int, total: int) -> None:
            check_claim()
            report(done, total)

        run = _Run(output, plans, write, checked_report)
        run.write_missing(drop_duplicates, existing)
        run.merge_lists(SKIPPED, ignored)
        run.merge_lists(REPAIRED)
        vectors_sha256 = _write_vectors(output, source.label_vectors())
        manifest = Manifest(
            modality=source.modality,
            source=about,
            classes=source.classes(),
            shards=tuple(run.shards()),
            label_vectors=None if vectors_sha256 is None else LABEL_VECTORS,
            label_vectors_sha256=vectors_sha256,
        )
        check_claim()
        output.write(MANIFEST, manifest.to_bytes())
    planned = sum(len(plan) for plan in plans)
    return Written(
        manifest,
        resumed=run.resumed,
        num_skipped=planned - run.duplicates - sum(shard.samples for shard in manifest.shards),
        duplicates=run.duplicates,
        **_lists(output),
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


def _lists(output: OutputFolder) -> dict[str, Any]:
    """Return the files that list skipped and repaired samples, if they exist."""
    present = output.files()
    found: dict[str, Any] = {}
    if SKIPPED in present:
        found["skipped"] = output.location(SKIPPED)
    if REPAIRED in present:
        found["repaired"] = output.location(REPAIRED)
        found["num_repaired"] = output.read(REPAIRED).count(b"\n")
    return found


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
    """Return the manifest if every file that it lists exists with its full size, otherwise None.

    Raises FileNotFoundError or ValueError if a file is missing and samples have been appended.
    """
    if (manifest := output.manifest()) is None:
        return None
    check_same(output.folder, manifest.sources[0], about)
    if manifest.earlier:
        # Writing the first generation again would remove the manifest of the later ones.
        return Manifest.load(output.folder)
    found = output.finished([shard.file for shard in manifest.shards])
    if any(shard.file not in found or found[shard.file].info != shard for shard in manifest.shards):
        return None
    if manifest.label_vectors is not None and not output.has_label_vectors(manifest):
        return None
    return manifest


class _Run:
    """Writes the shards that are missing. duplicates: the number of samples dropped from all
    shards. resumed: the number of shards that already existed.
    """

    def __init__(
        self, output: OutputFolder, plans: Sequence[Plan], write: Write, report: Report
    ) -> None:
        self._output = output
        self._plans = plans
        self._write = write
        self._report = report
        found = output.finished([plan.file for plan in plans])
        self._before = frozenset(found)
        self._finished = {file: shard.info for file, shard in found.items()}
        self.duplicates = sum(shard.duplicates for shard in found.values())
        self.resumed = len(found)
        self._last_skipped: Skipped | None = None

    def shards(self) -> list[ShardInfo]:
        """Return the shards in the order of the plans."""
        return [self._finished[plan.file] for plan in self._plans if plan.file in self._finished]

    def write_missing(self, drop_duplicates: bool, existing: Existing | None) -> None:
        missing = [plan for plan in self._plans if plan.file not in self._finished]
        if not drop_duplicates:
            self._write_all(missing, missing, None)
        else:
            # The training samples are compared with the other splits.
            training = [plan for plan in missing if plan.split == TRAIN]
            self._write_all([plan for plan in missing if plan.split != TRAIN], missing, None)
            others = [info.file for info in self._finished.values() if info.split != TRAIN]
            held_out = [(self._output, file) for file in others]
            if existing is not None:
                held_out += [(existing.output, file) for file in existing.held_out]
            self._write_all(training, training, HeldOut(held_out))
        if not self._finished:
            raise ValueError(
                f"no shards were written, because all samples were skipped: {self._last_skipped}"
            )

    def _write_all(
        self, plans: Sequence[Plan], left: Sequence[Plan], held_out: HeldOut | None
    ) -> None:
        """Write `plans`. left: all plans that have not been written yet."""
        total = sum(len(plan) for plan in self._plans)
        done = total - sum(len(plan) for plan in left)

        def count(number: int) -> None:
            nonlocal done
            done += number
            self._report(done, total)

        for shard in self._write(plans, held_out, count):
            self.duplicates += shard.duplicates
            self._last_skipped = shard.last_skipped or self._last_skipped
            if shard.info is not None:
                self._finished[shard.file] = shard.info

    def merge_lists(self, name: str, ignored: Iterable[Skipped] = ()) -> None:
        """Replace the lists of the shards with the file `name`, sorted by shard.

        A finished folder has no lists of shards. If some of its shards were lost and written again,
        the lines of the other shards come from its file `name`.
        """
        present = self._output.files()
        old = self._output.read(name).splitlines(keepends=True) if name in present else []
        lines = {file: b"".join(of) for file, of in by_shard(old).items() if file in self._before}
        lists = {plan.file: list_of_shard(plan.file, name) for plan in self._plans}
        lists = {file: listed for file, listed in lists.items() if listed in present}
        lines |= zip(lists, self._output.read_all(list(lists.values())), strict=True)
        content = to_lines(ignored) + b"".join(lines[file] for file in sorted(lines))
        if content:
            self._output.write(name, content)
        else:
            self._output.delete([name])
        self._output.delete(lists.values())

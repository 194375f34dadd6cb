"""Builds the offset indices and the manifest for existing webdataset tars, which are not
changed.

This module selects the tars, their splits and the class list, and writes the results.
`data/tars/samples.py` reads the tars.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.files import commit
from data.messages import Report, pluralize, silent
from data.processes import over_jobs
from data.shards.index import index_path
from data.shards.manifest import CLASSES, MANIFEST, Manifest, SourceInfo
from data.shards.writing.output import OutputFolder
from data.skipped import NAMED, SKIPPED, Skipped, to_lines
from data.tars.labels import INDEXED, LABEL_EXTENSIONS, Labels
from data.tars.listing import list_tars, missing_numbers, names_in_manifest, split_of_tars
from data.tars.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Rules,
    TarScan,
    extensions_of,
    scan_tar,
)


@dataclass(frozen=True)
class Indexed:
    """The result of indexing. problems: what was not indexed. notes: the lines to print.

    skipped: the file that lists everything that was not indexed, or None if everything was indexed.
    """

    manifest: Manifest
    problems: tuple[Skipped, ...]
    notes: tuple[str, ...]
    skipped: Path | None


def index_shards(
    folder: Path,
    *,
    out: Path | None = None,
    classes: Path | None = None,
    splits: Sequence[tuple[str, str]] = (),
    sample: str | None = None,
    label: str | None = None,
    label_field: str = "label",
    expected: int | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    report: Report = silent,
) -> Indexed:
    """Index the tars in `folder`, writing the indices next to them, or to `out` with links to the
    tars.

    classes: a file with one class name per line; by default, the classes are the labels found.
    splits: pairs (name, glob of paths); by default, words such as train and val in the paths
    determine the split. sample: the extension of the sample, if several files with the same key are
    candidates. label: the extension of the label; by default `cls`, or `json` if there is none.
    label_field: the field of a `.json` label. expected: the number of samples that the tars should
    contain in total. workers, ray: see `over_jobs`. report: a callback that is called as
    `report(done, total)` with byte counts.

    Raises ValueError, and writes nothing, for compressed tars. Unless `skip_bad` is set, also
    raises ValueError for tars that are damaged, truncated or have an unexpected number of samples,
    and for samples without an image or text or without a label. With `skip_bad`, the manifest
    records the shards with missing samples, and `skipped.jsonl` lists every problem.
    """
    if out is None or out.resolve() == folder.resolve():
        out = folder
    tars = list_tars(folder)
    _check_out(folder, out, tars)
    split_of = split_of_tars(folder, tars, splits)
    names = names_in_manifest(folder, split_of)
    class_list = None if classes is None else Labels.read(classes)
    endings = (sample.lower().lstrip("."),) if sample else _endings(list(split_of))
    label_endings = (label.lower().lstrip("."),) if label else LABEL_EXTENSIONS
    rules = Rules(endings, label_endings, label_field, class_list)
    sizes = [tar.stat().st_size for tar in split_of]
    scans: dict[Path, TarScan] = {}
    work = partial(scan_tar, rules=rules)
    found = over_jobs(work, list(split_of), total_bytes=sum(sizes), workers=workers, ray=ray)
    for tar, scan in zip(split_of, found, strict=True):
        scans[tar] = scan
        report(sum(sizes[: len(scans)]), sum(sizes))
    problems = [problem for scan in scans.values() for problem in scan.problems]
    groups = sum(scan.groups for scan in scans.values())
    if expected is not None and groups != expected:
        problems.append(Skipped(str(folder), f"found {groups:,} samples, expected {expected:,}"))
    used = [tar for tar, scan in scans.items() if len(scan.index)]
    _check_problems(folder, problems, skip_bad=skip_bad, nothing=not used)
    if class_list is None:
        class_list = Labels.found(text for scan in scans.values() for text in scan.texts)
        for scan in scans.values():
            scan.index.relabel([class_list.label(text) for text in scan.texts])
    before = Manifest.read(out) if (out / MANIFEST).is_file() else None
    _prepare(out, {names[tar]: tar for tar in used} if out != folder else {})
    shards = []
    for tar in used:
        name, scan = names[tar], scans[tar]
        info = scan.index.info(name, split_of[tar], size=scan.bytes, sha256=scan.sha256)
        commit(index_path(out / name), scan.index.to_bytes(info))
        shards.append(info)
    parameters: dict[str, str | int | float | bool | None] = {
        "folder": folder.resolve().name,
        "sample": sample,
        "label_field": label_field,
        "positions": class_list.positions,
        "left_out": len(problems),
    }
    if expected is not None:
        parameters["expected_samples"] = expected
    manifest = Manifest(
        modality="image" if endings[0].rpartition(".")[2] in IMAGE_EXTENSIONS else "text",
        source=SourceInfo(kind=INDEXED, parameters=parameters),
        classes=class_list.classes,
        shards=tuple(shards),
        incomplete={names[tar]: why for tar in used if (why := scans[tar].unfinished)},
    )
    reason = "name lacks a key or an extension, so webdataset ignores the file"
    other_files = [
        Skipped(f"{tar}: {name}", reason)
        for tar, scan in scans.items()
        for name in scan.other_files
    ]
    skipped = None
    if problems or other_files:
        skipped = out / SKIPPED
        commit(skipped, to_lines([*problems, *other_files]))
    manifest = manifest.with_class_file(OutputFolder(out).write_classes)
    commit(out / MANIFEST, manifest.to_bytes())
    notes = []
    if missing := missing_numbers(tars):
        notes.append(f"gaps in the numbers of the tars: {', '.join(missing)} missing")
    if unmatched := [tar.name for tar in tars if tar not in split_of]:
        notes.append(f"not indexed, because no --split matches: {', '.join(unmatched)}")
    if other_files:
        notes.append(
            "ignored files whose names lack a key or an extension, as webdataset does: "
            f"{len(other_files):,}"
        )
    # Without this note, the change would go undetected, because a new index accepts any content.
    old = {} if before is None else {shard.file: shard.sha256 for shard in before.shards}
    if changed := [
        shard.file for shard in shards if old.get(shard.file, shard.sha256) != shard.sha256
    ]:
        notes.append(f"changed since the last index: {', '.join(changed)}")
    return Indexed(manifest, tuple(problems), tuple(notes), skipped)


def _check_out(folder: Path, out: Path, tars: Sequence[Path]) -> None:
    """Raise ValueError if writing to `out` would overwrite data or create an invalid folder."""
    if out == folder and any(tar.parent != folder for tar in tars):
        nested = next(tar for tar in tars if tar.parent != folder)
        raise ValueError(
            f"{nested} is in a subfolder, but a manifest can list only tars in its own folder: "
            "pass -o DIR to create a folder with links to the tars"
        )
    if out != folder and folder.resolve() in out.resolve().parents:
        raise ValueError(f"{out} is inside the folder to index, {folder}: choose another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose a folder")
    # If there is an index, `skipped.jsonl` was written by an interrupted run and may be replaced.
    unknown = not (out / MANIFEST).is_file() and not any(out.glob(index_path(Path("*")).name))
    if unknown and (out / SKIPPED).exists():
        raise ValueError(f"{out / SKIPPED} would be replaced: move it, or choose another folder")
    if (out / MANIFEST).is_file():
        if (kind := Manifest.read(out).source.kind) != INDEXED:
            raise ValueError(f"{out} contains shards of {kind}, which are already indexed")
    elif out != folder and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose an empty folder")


def _endings(tars: Sequence[Path]) -> tuple[str, ...]:
    """Return the extensions of the samples: image extensions if there are images, otherwise text
    extensions.
    """
    found: set[str] = set()
    for tar in tars:
        found |= extensions_of(tar).keys()
        for endings in (IMAGE_EXTENSIONS, TEXT_EXTENSIONS):
            if found & set(endings):
                return endings
    known = ", .".join(IMAGE_EXTENSIONS + TEXT_EXTENSIONS)
    raise ValueError(
        f"{tars[0].parent}: no member ends in .{known}; found "
        f"{', '.join(sorted('.' + e for e in found)[:8]) or 'no members'}: pass --sample EXTENSION"
    )


def _check_problems(
    folder: Path, problems: Sequence[Skipped], *, skip_bad: bool, nothing: bool
) -> None:
    more = len(problems) - NAMED
    listed = "; ".join(map(str, problems[:NAMED])) + f"; and {more:,} more" * (more > 0)
    if nothing:
        raise ValueError(f"{folder} does not contain a complete sample: {listed}")
    if problems and not skip_bad:
        raise ValueError(
            f"{folder} has {pluralize(len(problems), 'problem')}: {listed}: fix them, or pass "
            "--skip-bad to index the rest"
        )


def _prepare(out: Path, links: dict[str, Path]) -> None:
    """Create `out` with links to the tars.

    An existing manifest is deleted, so that the folder is unfinished until the new manifest is
    written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, SKIPPED, CLASSES):
        (out / name).unlink(missing_ok=True)
    for name, tar in links.items():
        if (out / name).is_symlink():  # only links are deleted, never tars
            (out / name).unlink()
        (out / name).symlink_to(tar.resolve())

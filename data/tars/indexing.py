"""Builds the offset indices and the manifest for existing webdataset tars.

This module selects the tars, their splits and the class list, and writes the results.
`data/tars/samples.py` reads the tars.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from pathlib import Path

from data.files import commit, walk_directory
from data.messages import Report, pluralize, printable, silent
from data.processes import over_jobs
from data.shards.index import index_path
from data.shards.manifest import CLASSES, MANIFEST, Manifest, SourceInfo
from data.shards.split_names import TRAIN, check_split, shard_splits, split_in_name
from data.shards.writing.output import OutputFolder
from data.skipped import NAMED, SKIPPED, Skipped, to_lines
from data.tars.labels import INDEXED, LABEL_EXTENSIONS, Labels
from data.tars.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Rules,
    TarScan,
    extensions_of,
    scan_tar,
)

_NAME = re.compile(r".*\.(tar(\..+)?|tgz|tbz2|txz|tzst)", re.IGNORECASE | re.DOTALL)
# The first bytes of files of gzip, bzip2, xz, zstd and lz4.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")


@dataclass(frozen=True)
class Indexed:
    """The result of indexing. problems: what was not indexed. notes: the lines to print. skipped:
    the file that lists the problems, or None if there are none.
    """

    manifest: Manifest
    problems: tuple[Skipped, ...]
    notes: tuple[str, ...]
    skipped: Path | None


def index_shards(
    folder: Path,
    *,
    classes: Path | None = None,
    splits: Sequence[tuple[str, str]] = (),
    sample: str | None = None,
    label: str | None = None,
    label_field: str = "label",
    label_sets: bool = False,
    skip_bad: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    report: Report = silent,
) -> Indexed:
    """Index the tars in `folder`, writing the indices next to them.

    classes: a file with one class name per line; by default, the classes are the labels found.
    splits: pairs (name, glob of file names); by default, words such as train and val in the names
    determine the split. sample: the extension of the sample, if several files with the same key are
    candidates. label: the extension of the label; by default `cls`, or `json` if there is none.
    label_field: the field of a `.json` label. label_sets: whether each sample has a set of labels:
    a list in that field, or labels separated by whitespace in `.cls`. workers, ray: see
    `over_jobs`. report: a callback that is called as `report(done, total)` with byte counts.

    Raises ValueError, and writes nothing, for compressed tars and a `skipped.jsonl` that would be
    replaced. Unless `skip_bad` is set, also
    raises ValueError for tars that are damaged or truncated, and for samples without an image or
    text or without a label. With `skip_bad`, the manifest records the shards with missing samples,
    and `skipped.jsonl` lists every problem.
    """
    tars = list_tars(folder)
    if (folder / MANIFEST).is_file() and (kind := Manifest.read(folder).source.kind) != INDEXED:
        raise ValueError(f"{folder} contains shards of {kind}, which are already indexed")
    # If there is an index, an interrupted run wrote `skipped.jsonl`, which may be replaced.
    written = (folder / MANIFEST, *folder.glob(index_path(Path("*")).name))
    if (folder / SKIPPED).exists() and not any(path.is_file() for path in written):
        raise ValueError(f"{folder / SKIPPED} would be replaced: move it to another folder")
    split_of = split_of_tars(folder, tars, splits)
    class_list = None if classes is None else Labels.read(classes)
    endings = (sample.lower().lstrip("."),) if sample else _endings(list(split_of))
    label_endings = (label.lower().lstrip("."),) if label else LABEL_EXTENSIONS
    rules = Rules(endings, label_endings, label_field, class_list, label_sets)
    sizes = [tar.stat().st_size for tar in split_of]
    scans: dict[Path, TarScan] = {}
    work = partial(scan_tar, rules=rules)
    found = over_jobs(work, list(split_of), total_bytes=sum(sizes), workers=workers, ray=ray)
    for tar, scan in zip(split_of, found, strict=True):
        scans[tar] = scan
        report(sum(sizes[: len(scans)]), sum(sizes))
    problems = [problem for scan in scans.values() for problem in scan.problems]
    used = [tar for tar, scan in scans.items() if len(scan.index)]
    _check_problems(folder, problems, skip_bad=skip_bad, nothing=not used)
    if class_list is None:
        class_list = Labels.found(text for scan in scans.values() for text in scan.texts)
        for scan in scans.values():
            scan.index.relabel([class_list.label(text) for text in scan.texts])
    # Without a manifest, the folder is unfinished until the new one is written.
    for name in (MANIFEST, SKIPPED, CLASSES):
        (folder / name).unlink(missing_ok=True)
    shards = []
    for tar in used:
        scan = scans[tar]
        info = scan.index.info(tar.name, split_of[tar], size=scan.bytes, sha256=scan.sha256)
        commit(index_path(tar), scan.index.to_bytes(info))
        shards.append(info)
    parameters: dict[str, str | int | float | bool | None] = {
        "folder": folder.resolve().name,
        "sample": sample,
        "label_field": label_field,
        "positions": class_list.positions,
        "left_out": len(problems),
    }
    manifest = Manifest(
        modality="image" if endings[0].rpartition(".")[2] in IMAGE_EXTENSIONS else "text",
        source=SourceInfo(kind=INDEXED, parameters=parameters),
        classes=class_list.classes,
        shards=tuple(shards),
        incomplete={tar.name: why for tar in used if (why := scans[tar].unfinished)},
    )
    if problems:
        commit(folder / SKIPPED, to_lines(problems))
    manifest = manifest.in_stored_form(OutputFolder(folder).write_classes)
    commit(folder / MANIFEST, manifest.to_bytes())
    notes = []
    if missing := missing_numbers(tars):
        notes.append(f"gaps in the numbers of the tars: {', '.join(missing)} missing")
    if unmatched := [tar.name for tar in tars if tar not in split_of]:
        notes.append(f"not indexed, because no --split matches: {', '.join(unmatched)}")
    if ignored := sum(scan.num_ignored for scan in scans.values()):
        notes.append(
            f"ignored files whose names lack a key or an extension, as webdataset does: {ignored:,}"
        )
    return Indexed(manifest, tuple(problems), tuple(notes), folder / SKIPPED if problems else None)


def list_tars(folder: Path) -> list[Path]:
    """Return the uncompressed tars in `folder`, sorted by name.

    Raises ValueError if there are no tars, a tar is compressed or in a subfolder, or a manifest
    cannot contain its name; FileNotFoundError for a broken link; and OSError for a folder that
    cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: pass a folder of webdataset tars")
    tars = []
    for path in sorted(
        parent / name for parent, _, names in walk_directory(folder) for name in names
    ):
        if not _NAME.fullmatch(path.name) or path.is_fifo():
            continue
        with path.open("rb") as file:
            if file.read(8).startswith(_COMPRESSED):
                raise ValueError(
                    f"{path} is compressed, so samples cannot be read individually: decompress all "
                    "such files to .tar first, for example with gunzip"
                )
        if path.suffix.lower() != ".tar":
            continue
        if path.parent != folder:
            raise ValueError(
                f"{printable(str(path))} is in a subfolder, but a manifest lists only tars in its "
                "own folder: create a folder of links to the tars (ln -s), and index that folder"
            )
        if printable(path.name) != path.name or "\\" in path.name:
            raise ValueError(
                f"{printable(str(path))}: a manifest cannot contain this file name: rename the file"
            )
        tars.append(path)
    if not tars:
        raise ValueError(f"{folder} contains no .tar: pass a folder of webdataset tars")
    return tars


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


def split_of_tars(
    folder: Path, tars: Sequence[Path], requested: Sequence[tuple[str, str]]
) -> dict[Path, str]:
    """Map tars to their splits, in the order of `requested`, or training first.

    requested: pairs (split, glob of names). Tars that do not match any glob are omitted. If
    `requested` is empty, the first word in the name that names a split is used, or "train" if there
    is none.
    """
    found: dict[Path, str] = {}
    if requested:
        for name, glob in requested:
            check_split(name)
            matching = [tar for tar in tars if fnmatchcase(tar.name, glob)]
            if not matching:
                raise ValueError(
                    f"--split {name}={glob} does not match any tar in {folder}: correct the glob"
                )
            found |= {tar: name for tar in matching if tar not in found}
        return found
    found = {tar: split_in_name(tar.name) or TRAIN for tar in tars}
    in_shards = shard_splits(found.values())
    found = {tar: in_shards[split] for tar, split in found.items()}
    return dict(sorted(found.items(), key=lambda item: item[1] != TRAIN))


def missing_numbers(tars: Sequence[Path]) -> list[str]:
    """Return the names of tars that are missing between consecutively numbered ones, such as
    `train-000002.tar` between `train-000001.tar` and `train-000003.tar`.
    """
    numbers: dict[str, dict[int, str]] = {}
    for tar in tars:
        if found := re.fullmatch(r"(.*?)(\d{1,18})", tar.stem):
            numbers.setdefault(found[1], {})[int(found[2])] = found[2]
    missing = []
    for prefix, known in numbers.items():
        for before, after in pairwise(sorted(known)):
            if after - before > 1:
                first, last = (f"{n:0{len(known[before])}d}" for n in (before + 1, after - 1))
                several = "" if first == last else f" to {prefix}{last}.tar"
                missing.append(f"{prefix}{first}.tar{several}")
    return missing

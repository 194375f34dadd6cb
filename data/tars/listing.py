"""Selects the tars of a folder to index, and determines the split and the new name of each.

Only uncompressed tars are accepted.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from data.files import walk_directory
from data.messages import printable
from data.shards.split_names import TRAIN, check_split, shard_splits, split_in_name

_NAME = re.compile(r".*\.(tar(\..+)?|tgz|tbz2|txz|tzst)", re.IGNORECASE | re.DOTALL)
# The first bytes of files of gzip, bzip2, xz, zstd and lz4.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")


def list_tars(folder: Path) -> list[Path]:
    """Return the uncompressed tars under `folder`, sorted by path.

    Raises ValueError if there are no tars or a tar is compressed, FileNotFoundError for a broken
    link, and OSError for a folder that cannot be read.
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
        if path.suffix.lower() == ".tar":
            tars.append(path)
    if not tars:
        raise ValueError(f"{folder} contains no .tar: pass a folder of webdataset tars")
    return tars


def split_of_tars(
    folder: Path, tars: Sequence[Path], requested: Sequence[tuple[str, str]]
) -> dict[Path, str]:
    """Map tars to their splits, in the order of `requested`, or training first.

    requested: pairs (split, glob of paths). Tars that do not match any glob are omitted. If
    `requested` is empty, the first word in the path that names a split is used, or "train" if there
    is none.
    """
    paths = {tar: tar.relative_to(folder).as_posix() for tar in tars}
    found: dict[Path, str] = {}
    if requested:
        for name, glob in requested:
            check_split(name)
            matching = [tar for tar, path in paths.items() if fnmatchcase(path, glob)]
            if not matching:
                raise ValueError(
                    f"--split {name}={glob} does not match any tar in {folder}: correct the glob"
                )
            found |= {tar: name for tar in matching if tar not in found}
        return found
    for tar, path in paths.items():
        found[tar] = split_in_name(path) or TRAIN
    in_shards = shard_splits(found.values())
    found = {tar: in_shards[split] for tar, split in found.items()}
    return dict(sorted(found.items(), key=lambda item: item[1] != TRAIN))


def names_in_manifest(folder: Path, tars: Iterable[Path]) -> dict[Path, str]:
    """Map each tar to its name in the manifest: its path, with hyphens instead of slashes."""
    names: dict[Path, str] = {}
    for tar in tars:
        name = tar.relative_to(folder).as_posix().replace("/", "-")
        if printable(name) != name or "\\" in name:
            raise ValueError(
                f"{printable(str(tar))}: a manifest cannot contain this file name: rename the file"
            )
        if name in names.values():
            raise ValueError(f"{tar}: another tar is also called {name}: rename one of them")
        names[tar] = name
    return names


def missing_numbers(tars: Sequence[Path]) -> list[str]:
    """Return the names of tars that are missing between consecutively numbered ones, such as
    `train-000002.tar` between `train-000001.tar` and `train-000003.tar`.
    """
    numbers: dict[tuple[Path, str], dict[int, str]] = {}
    for tar in tars:
        if found := re.fullmatch(r"(.*?)(\d{1,18})", tar.stem):
            numbers.setdefault((tar.parent, found[1]), {})[int(found[2])] = found[2]
    missing = []
    for (_, prefix), known in numbers.items():
        for before, after in pairwise(sorted(known)):
            if after - before > 1:
                first, last = (f"{n:0{len(known[before])}d}" for n in (before + 1, after - 1))
                several = "" if first == last else f" to {prefix}{last}.tar"
                missing.append(f"{prefix}{first}.tar{several}")
    return missing

"""Selects the tars of a folder to index, and determines the split and the new name of each.

Only uncompressed tars are accepted. `ExpectedSamples` checks the number of samples, because no
other check detects that samples are missing from a valid tar.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from data.files import walk_directory
from data.messages import printable
from data.shards.split_names import TRAIN, check_split, shard_splits, split_in_name
from data.skipped import Skipped

_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}
_COMPRESSED_ENDINGS = (".tgz", ".tbz2", ".txz", ".tzst")
_MAX_COUNTS_BYTES = 1 << 28


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
        inner = ".tar." in path.name.lower() or path.name.lower().endswith(_COMPRESSED_ENDINGS)
        if not (inner or path.suffix.lower() == ".tar"):
            continue
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"{path} is a broken symbolic link: copy the tar, or remove the link"
            )
        if not path.is_file():
            continue
        with path.open("rb") as file:
            check_plain(path, file.read(8))
        if path.suffix.lower() == ".tar":
            tars.append(path)
    if not tars:
        raise ValueError(f"{folder} contains no .tar: pass a folder of webdataset tars")
    return tars


def check_plain(tar: Path | str, start: bytes) -> None:
    """Raise ValueError if the first 8 bytes of a file show that it is compressed."""
    for magic, unpack in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(
                f"{tar} is compressed, so samples cannot be read individually: decompress all such "
                f"files to .tar first ({unpack})"
            )


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


@dataclass(frozen=True)
class ExpectedSamples:
    """The expected number of samples, either `total` over all tars or `of_tar` for each tar.

    of_tar: a map from the path of a tar, relative to the folder, to its count.
    """

    total: int | None = None
    of_tar: Mapping[str, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "ExpectedSamples":
        """Parse a whole number, or the path of a JSON file of counts: {"train-000.tar": 1000}.

        Raises ValueError for any other text, and FileNotFoundError for a missing file.
        """
        if text.isascii() and text.isdecimal():
            return cls(total=int(text))
        path = Path(text)
        if not path.is_file():
            raise FileNotFoundError(
                f"{text} is neither a number of samples nor a file: pass one or the other"
            )
        if path.stat().st_size > _MAX_COUNTS_BYTES:
            raise ValueError(
                f"{path} has more than {_MAX_COUNTS_BYTES:,} bytes: pass a file of sample counts"
            )
        try:
            counts = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): correct it") from error
        return cls(of_tar=_checked(path, counts))

    def in_all(self, folder: Path, tars: Collection[Path]) -> int:
        """Return the number of samples expected in `tars`.

        Raises ValueError for a tar without a count, and for a count whose tar is not in `folder`.
        """
        if self.of_tar is None:
            assert self.total is not None
            return self.total
        names = {tar.relative_to(folder).as_posix() for tar in tars}
        if uncounted := sorted(names - self.of_tar.keys()):
            raise ValueError(
                f"the expected counts do not include {folder / uncounted[0]}: add its count"
            )
        if absent := sorted(name for name in self.of_tar if not (folder / name).is_file()):
            raise ValueError(
                f"{folder} does not contain {absent[0]!r}, which should have "
                f"{self.of_tar[absent[0]]:,} samples: copy the tar to the folder, or remove its "
                "count"
            )
        return sum(self.of_tar[name] for name in names)

    def mismatches(self, folder: Path, tars: Mapping[Path, int]) -> dict[Path, Skipped]:
        """Return the tars whose sample counts are not as expected, or `folder` if the total is not.

        tars: the number of samples found in each tar.
        """
        if self.of_tar is None:
            wanted = {folder: (sum(tars.values()), self.in_all(folder, tars))}
        else:
            wanted = {
                tar: (found, self.of_tar[tar.relative_to(folder).as_posix()])
                for tar, found in tars.items()
            }
        return {
            path: Skipped(str(path), f"found {found:,} samples, expected {expected:,}")
            for path, (found, expected) in wanted.items()
            if found != expected
        }


def _checked(path: Path, counts: Any) -> dict[str, int]:
    if not isinstance(counts, dict):
        raise ValueError(f'{path} is not a JSON object such as {{"train-000.tar": 1000, …}}')
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{path}: the count of {name!r} is {count!r}: pass a whole number")
    return counts

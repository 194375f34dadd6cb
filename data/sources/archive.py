"""A few files of a published archive, by name, wherever they stand in it; nothing is unpacked."""

import tarfile
import zlib
from collections.abc import Collection
from lzma import LZMAError
from pathlib import Path, PurePosixPath

_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, LZMAError)


def archived_files(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    """Name -> content of those of `names` that the archive holds; it may be compressed.

    Raises ValueError, in one line, where it is damaged, cut off or no archive.
    """
    found = {}
    try:
        with tarfile.open(archive) as members:
            for member in members:
                name = PurePosixPath(member.name).name
                if name in names and (file := members.extractfile(member)):
                    found[name] = file.read()
    except _DAMAGE as error:
        about = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise ValueError(f"{archive} is damaged ({about}): download it again") from error
    return found


def loose_files(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    """Name -> content of those of `names` that stand in `folder` itself."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}

"""Reads individual files from a published archive without unpacking it. A file is found by its
name, whichever folder of the archive contains it.
"""

import tarfile
import zlib
from collections.abc import Collection
from lzma import LZMAError
from pathlib import PurePosixPath

from data.files import is_of_file_system
from data.remote.input_path import InputPath

# The first bytes of gzip, bzip2 and xz files. A plain tar has its magic number in the first header.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_TAR_MAGIC_AT, _TAR_MAGIC = 257, b"ustar"
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, LZMAError)


def archived_files(archive: InputPath, names: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files in `names` that are in the archive, which may be compressed.

    Raises ValueError with a one-line message if the file is damaged, truncated or not an archive.
    """
    found = {}
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file) as members:
            for member in members:
                name = PurePosixPath(member.name).name
                if name in names and (content := members.extractfile(member)):
                    found[name] = content.read()
    except _DAMAGE as error:
        if is_of_file_system(error):
            raise
        _reject_other_format(archive)
        about = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise ValueError(f"{archive} is damaged ({about}): download it again") from error
    return found


def _reject_other_format(archive: InputPath) -> None:
    """Raise ValueError for a file that was never a tar. An empty file may be a truncated tar."""
    with archive.open("rb") as file:
        start = file.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
    if start and not start.startswith(_COMPRESSED) and start[_TAR_MAGIC_AT:] != _TAR_MAGIC:
        raise ValueError(
            f"{archive} is not a tar archive, plain or compressed (it begins with "
            f"{start[:4].hex()}): pass the archive, or download it again"
        )


def loose_files(folder: InputPath, names: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files in `names` that are directly in `folder`."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}

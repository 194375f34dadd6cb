"""Reads individual files of a published archive, packed or unpacked. A file is found by its name,
whichever folder of the archive contains it.
"""

import tarfile
import zlib
from collections.abc import Collection
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from data.messages import one_line

_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, LZMAError)


def published_files(
    path: Path, inner: str, names: Collection[str], published: str
) -> dict[str, bytes]:
    """Return the contents of the files `names` in an archive, which may be compressed, or in an
    unpacked folder or its subfolder `inner`.

    published: the archive to use, for errors. Raises FileNotFoundError for a missing file, and
    ValueError if the archive is damaged, truncated or not a tar.
    """
    if path.is_dir():
        folder = path / inner if (path / inner).is_dir() else path
        found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    elif not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass {published} or its folder")
    else:
        found = _archived(path, names)
    if missing := sorted(set(names) - found.keys()):
        raise FileNotFoundError(f"{path} does not contain {missing[0]}: pass {published}")
    return found


def _archived(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    found = {}
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file) as members:
            for member in members:
                name = PurePosixPath(member.name).name
                if name in names and (content := members.extractfile(member)):
                    found[name] = content.read()
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk; gzip raises other OSErrors for damaged content
        raise ValueError(
            f"{archive} is damaged, or not a tar archive ({one_line(error, 100)}): download it "
            "again"
        ) from error
    return found

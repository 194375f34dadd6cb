"""Folders below a folder: hidden ones apart, and an error for one that cannot be read."""

import os
from collections.abc import Iterator
from pathlib import Path

# At the root of a file system; only root can read it.
_LOST_AND_FOUND = "lost+found"


def is_hidden(folder: str) -> bool:
    """Whether a folder of this name is not for data."""
    return folder.startswith(".") or folder == _LOST_AND_FOUND


def walked(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """`os.walk`, which leaves out a folder that cannot be read: this raises the OSError.

    (folder, names of folders in it, names of other entries) of `folder` and of all below but
    lost+found. Links are not followed, nor are names that the caller takes out of the second.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name != _LOST_AND_FOUND]
        yield Path(parent), folders, names


def _raise(error: OSError) -> None:
    raise error

"""`os.walk` that raises where a folder cannot be read: the default is to leave it out silently."""

import os
from collections.abc import Iterator
from pathlib import Path


def walked(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """(folder, names of folders in it, names of other entries) for `folder` and all below.

    As in `os.walk`, names taken out of the second are not walked and links are not followed.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        yield Path(parent), folders, names


def _raise(error: OSError) -> None:
    raise error

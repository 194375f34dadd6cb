"""What a command says where it cannot write to the place that it was given."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_to(path: Path, option: str) -> Iterator[None]:
    """Turn the system's error about `path`, or a folder above it, into one with a remedy.

    option: the one that names another place.
    """
    try:
        yield
    except OSError as error:
        if not error.filename or not _is_about(path, str(error.filename)):
            raise
        raise OSError(
            f"{path} cannot be written ({error.strerror}): name another place with {option}"
        ) from error


def check_writable(path: Path, option: str) -> None:
    """Raise now what writing the file `path` would raise, before the work whose result it holds."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it with {option}")
    # No question about permissions answers for every kind of file system: a file does.
    aside = path.with_name(f"{path.name}.{os.getpid()}.trial")
    with written_to(path, option):
        aside.open("xb").close()
        aside.unlink()


def _is_about(path: Path, name: str) -> bool:
    # What is written first may stand beside it, as `<name>.part`.
    inside_or_beside = name.startswith((f"{path}/", f"{path}."))
    return inside_or_beside or name == str(path) or Path(name) in path.parents

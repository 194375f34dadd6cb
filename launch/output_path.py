"""Errors of commands that cannot write to the path they were given: they name the option."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def explain_write_errors(path: Path, option: str) -> Iterator[None]:
    """Turn the system's errors about `path`, or a folder above it, into one that names `option`."""
    try:
        yield
    except OSError as error:
        if not error.filename or not _is_about(path, str(error.filename)):
            raise
        raise OSError(
            f"{path} cannot be written ({error.strerror}): name another place with {option}"
        ) from error


def check_writable(path: Path, option: str) -> None:
    """Raise the error that writing the file `path` would raise, before the work starts."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it with {option}")
    # Permission bits do not decide on every file system; creating a file does.
    trial = path.with_name(f"{path.name}.{os.getpid()}.trial")
    with explain_write_errors(path, option):
        trial.open("xb").close()
        trial.unlink()


def _is_about(path: Path, name: str) -> bool:
    # The file may first be written next to it, as `<name>.part`.
    is_near = name.startswith((f"{path}/", f"{path}."))
    return is_near or name == str(path) or Path(name) in path.parents

"""Errors that name the option to change if an output path cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def explain_write_errors(path: Path, option: str) -> Iterator[None]:
    """Turn an OSError about `path`, or a folder above it, into one that names `option`."""
    try:
        yield
    except OSError as error:
        if not error.filename:
            raise
        # Bundles, galleries and tokenizers are written where the path leads, through its links.
        name, target = os.path.realpath(str(error.filename)), os.path.realpath(path)
        # Some commands first write to `<name>.part` in the same folder.
        is_near = name.startswith((f"{target}/", f"{target}.")) or name == target
        if not (is_near or Path(name) in Path(target).parents):
            raise
        raise OSError(
            f"{path} cannot be written ({error.strerror}): choose another path with {option}"
        ) from error


def check_new(out: Path, *, force: bool) -> None:
    """Raise ValueError if the output folder exists, unless `force` replaces it."""
    if out.exists() and not force:
        raise ValueError(
            f"{out} already exists: remove it, choose another folder with --out, or pass --force "
            "to replace it"
        )


def check_writable(path: Path, option: str) -> None:
    """Raise the error that writing to the file `path` would raise, before any work is done."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: pass the path of a file to {option}")
    # Permission bits are not reliable on every file system, so create a file.
    trial = path.with_name(f"{path.name}.{os.getpid()}.trial")
    with explain_write_errors(path, option):
        trial.open("xb").close()
        trial.unlink()

"""The folder names under a run's `checkpoints`, and the renames between them.

`step-00000010` is a committed checkpoint. A folder `….partial` is being written. A folder
`….replaced` is an older copy of a step that is being saved again; it is valid until the new folder
has its final name. A folder `….discarded` is being deleted.
"""

import re
import shutil
from pathlib import Path

from data.files import sync
from data.retry import retried

PARTIAL, REPLACED, DISCARDED = ".partial", ".replaced", ".discarded"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a committed folder or its replaced copy, or None for other
    names.
    """
    match = re.fullmatch(r"step-(\d{8,})", path.name.removesuffix(REPLACED), re.ASCII)
    step = int(match[1]) if match else None
    if step is None or path.name.removesuffix(REPLACED) != step_folder(path.parent, step).name:
        return None
    return step


def committed_folders(root: Path) -> list[Path]:
    """Return the folders of committed checkpoints under `root`, oldest first."""
    return [path for path in candidate_folders(root) if path.suffix != REPLACED]


def candidate_folders(root: Path) -> list[Path]:
    """Return the committed folders and replaced copies, oldest first. A copy precedes the folder of
    its step.

    Raises OSError if `root` exists but cannot be read, so that it is not mistaken for a run without
    checkpoints.
    """
    try:
        paths = retried(str(root), lambda: list(root.iterdir()))
    except FileNotFoundError:
        return []
    found = [path for path in paths if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.suffix != REPLACED))


def remove_leftovers(root: Path) -> None:
    """Delete the folders that a killed run was writing or deleting, but not the committed ones."""
    for path in root.iterdir():
        if re.fullmatch(r"step-\d+(\.partial|(\.replaced)?\.discarded)", path.name):
            _delete(path)


def publish(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its final name. A complete copy of the step, new or old, is on
    disk at all times.

    May be called again after a partial failure, for example if a file server reports an error for
    a rename that succeeded.
    """
    older = folder.with_name(folder.name + REPLACED)
    if _exists(temporary) or not _exists(folder):
        sync(temporary)
        if _exists(older):  # left by a killed run; may be the only valid copy
            if _exists(folder):
                discard(folder)
        elif _exists(folder):
            folder.rename(older)
        temporary.rename(folder)
    sync(folder.parent)
    if _exists(older):
        discard(older)


def settle_replaced(older: Path) -> None:
    """Finish the replacement that a killed run started: delete the old copy, or rename it back if
    the new folder does not exist."""
    folder = older.with_name(older.name.removesuffix(REPLACED))
    if _exists(folder):
        discard(older)
    else:
        older.rename(folder)


def discard(path: Path) -> None:
    """Rename a folder before deleting it, so that a partial deletion does not look committed."""
    discarded = path.with_name(path.name + DISCARDED)
    _delete(discarded)
    path.rename(discarded)
    _delete(discarded)


def _exists(path: Path) -> bool:
    return mode_of(path) is not None


def mode_of(path: Path) -> int | None:
    """Return the `st_mode` of a path without following links, or None if the path does not
    exist.

    Raises OSError for disk errors, for which `os.path.lexists` and, since Python 3.14,
    `Path.is_dir` and `Path.is_file` return False.
    """
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

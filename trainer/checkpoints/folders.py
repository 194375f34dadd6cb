"""The names under a run's `checkpoints`, and how one name takes the place of another.

`step-00000010` is committed; `….partial` is being written; `….replaced` is an older copy of a step
that is saved anew, which counts until the new one has its name; `….discarded` is being deleted.
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
    """The step of a committed folder or its replaced copy, by its name; None of all else."""
    match = re.fullmatch(r"step-(\d{8,})", path.name.removesuffix(REPLACED), re.ASCII)
    step = int(match[1]) if match else None
    if step is None or path.name.removesuffix(REPLACED) != step_folder(path.parent, step).name:
        return None
    return step


def committed_folders(root: Path) -> list[Path]:
    """The folders of committed checkpoints under `root`, oldest first."""
    return [path for path in candidate_folders(root) if path.suffix != REPLACED]


def candidate_folders(root: Path) -> list[Path]:
    """Committed folders, oldest first, each after the copy that it is replacing.

    Raises OSError where `root` is there and cannot be read: that is not a run without checkpoints.
    """
    try:
        paths = retried(str(root), lambda: list(root.iterdir()))
    except FileNotFoundError:
        return []
    found = [path for path in paths if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.suffix != REPLACED))


def remove_leftovers(root: Path) -> None:
    """Delete what a killed run was writing or deleting; committed folders are not touched."""
    for path in root.iterdir():
        if re.fullmatch(r"step-\d+(\.partial|(\.replaced)?\.discarded)", path.name):
            _delete(path)


def publish(temporary: Path, folder: Path) -> None:
    """Rename a finished folder; at every instant that step or its old copy is on disk.

    It may be called again after a partial failure, such as a file server that reports an error for
    a rename that it carried out.
    """
    older = folder.with_name(folder.name + REPLACED)
    if _is_there(temporary) or not _is_there(folder):
        sync(temporary)
        if _is_there(older):  # a killed run left it, and it may be the only sound copy
            if _is_there(folder):
                discard(folder)
        elif _is_there(folder):
            folder.rename(older)
        temporary.rename(folder)
    sync(folder.parent)
    if _is_there(older):
        discard(older)


def settle_replaced(older: Path) -> None:
    """End what a killed run had begun: the copy goes, or gets its name back where it is alone."""
    folder = older.with_name(older.name.removesuffix(REPLACED))
    if _is_there(folder):
        discard(older)
    else:
        older.rename(folder)


def discard(path: Path) -> None:
    """Delete a folder, under another name: half deleted it must not look committed."""
    doomed = path.with_name(path.name + DISCARDED)
    _delete(doomed)
    path.rename(doomed)
    _delete(doomed)


def _is_there(path: Path) -> bool:
    return mode_of(path) is not None


def mode_of(path: Path) -> int | None:
    """The `st_mode` of a path, links not followed; None where there is none.

    Raises OSError where the disk fails: `os.path.lexists`, and `Path.is_dir` and `is_file` from
    Python 3.14 on, call the path missing.
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

"""Paths of images that a file lists, such as a label file or JSON annotations.

The file is not trusted: a path must stay inside the folder of the data set.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

from data.files import is_hidden
from data.messages import shown
from data.remote.input_path import InputPath
from data.remote.path import RemotePath
from data.shards.split_names import split_name

_MOST_BYTES = 255  # of a file name, in common file systems
_LEVELS = 2  # levels of subfolders that are searched for listed images


def path_inside(folder: InputPath, name: str, base: str = ".") -> str:
    """Return the path of the listed file `name` relative to `folder`.

    base: the subfolder to which `name` is relative. An absolute path outside `folder` is also
    interpreted as relative to this subfolder. Links are not resolved, because an image may be a
    link to a file outside the folder. Raises ValueError if the path leaves `folder` or contains a
    name that is too long.
    """
    root = os.path.abspath(str(folder))
    name = name.strip()
    if isinstance(folder, RemotePath):  # a URL would otherwise be a relative path
        name = name.removeprefix(f"{folder}/")
    found = os.path.relpath(os.path.join(root, base, name), root)
    if _leaves(found) and os.path.isabs(name):
        found = os.path.relpath(os.path.join(root, base, name.lstrip("/")), root)
    if _leaves(found):
        raise ValueError(f"{shown(name)} is outside {folder}: use files inside it")
    if max(len(os.fsencode(part)) for part in found.split(os.sep)) > _MOST_BYTES:
        raise ValueError(f"{shown(name)} is longer than a file name can be")
    return found


def _leaves(path: str) -> bool:
    return path.split(os.sep)[0] == os.pardir


def base_of(folder: InputPath, names: Sequence[str], split: str | None, where: InputPath) -> str:
    """Return the subfolder of `folder` to which the listed `names` are relative.

    This is `folder` itself if it contains one of `names`. Otherwise, it is the only subfolder, up
    to two levels down, that contains one of them; subfolders that are named after `split` take
    precedence. If there is none, `folder` is returned, so that the first missing image is reported.

    where: the file that lists the names. Raises ValueError if several subfolders qualify.
    """
    if _contains_any(folder, ".", names):
        return "."
    found = [base for base in _subfolders(folder) if _contains_any(folder, base, names)]
    of_split = [base for base in found if split and split_name(base.split(os.sep)[0]) == split]
    found = of_split or found
    if len(found) > 1:
        raise ValueError(
            f"{where}: its images are in both {folder / found[0]} and {folder / found[1]}: move "
            "one of these folders"
        )
    return found[0] if found else "."


def _contains_any(folder: InputPath, base: str, names: Iterable[str]) -> bool:
    for name in names:
        try:
            if (folder / path_inside(folder, name, base)).is_file():
                return True
        except ValueError:
            continue
    return False


def _subfolders(folder: InputPath, levels: int = _LEVELS, base: str = "") -> Iterator[str]:
    """Yield the subfolders of `folder` up to `levels` levels down, as relative paths."""
    entries = (folder / base).iterdir()
    names = sorted(one.name for one in entries if one.is_dir() and not is_hidden(one.name))
    for name in names:
        yield (path := os.path.join(base, name))
        if levels > 1:
            yield from _subfolders(folder, levels - 1, path)

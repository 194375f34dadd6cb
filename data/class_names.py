"""A file of class names, one a line; the position of a line is the label."""

from pathlib import Path


def read_class_names(path: Path) -> list[str]:
    """The names of a file, less the space around each and empty lines at its end.

    Raises FileNotFoundError, and ValueError with the line for one that is empty or stands twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"class names {path} do not exist: give a file of one name a line")
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from error
    while names and not names[-1]:
        names.pop()
    if not names:
        raise ValueError(f"{path} is empty: give one class name a line")
    first: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if not name:
            raise ValueError(f"{path}, line {number} is empty: give one class name a line")
        if first.setdefault(name, number) != number:
            raise ValueError(
                f"{path}, line {number}: {name!r} stands in line {first[name]} too: "
                "make the names differ"
            )
    return names

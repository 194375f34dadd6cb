"""An item of a gallery, and the lines that items are written as: JSON, so that any name is one.

A picture: ["cats/1.jpg", bytes, modification time in ns]. A text: ["its line", bytes, the first 63
bits of its BLAKE2b, where it begins in the file, what is shown of it].
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.bundle.spec import Reads


class Item(NamedTuple):
    """`name`: the path in the folder, "/" between its parts, or the number of the line.

    It is the same item as another of its name where `size` and `stamp` are equal, too.
    """

    name: str
    size: int
    stamp: int
    start: int = 0
    text: str | None = None


def item_line(item: Item) -> bytes:
    """One line of ASCII, its end included, even for a name with line breaks or that is no UTF-8."""
    fields = item if item.start or item.text is not None else item[:3]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def parse_item(line: bytes) -> Item:
    """Raises ValueError for what `item_line` did not write."""
    try:
        item = Item(*json.loads(line))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is no item") from error
    if not (isinstance(item.name, str) and isinstance(item.size, int) and _is_int(item.stamp)):
        raise ValueError(f"{line[:80]!r} is no item")
    return item


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def shown_name(name: str) -> str:
    """A name as JSON can hold it: bytes that are no UTF-8 become `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_items(path: Path) -> Iterator[Item]:
    """The items of a file of such lines."""
    with path.open("rb") as file:
        yield from map(parse_item, file)


def order_of(reads: Reads) -> Callable[[str], Any]:
    """Name -> what items are sorted by: the parts of a path, or the number of a line."""
    return int if reads == "texts" else _parts


def _parts(name: str) -> list[str]:
    return name.split("/")

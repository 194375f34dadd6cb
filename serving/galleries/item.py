"""`Item`: an item of a collection, and its line in the files of a gallery.

Does not import torch.
"""

import json
from typing import NamedTuple


class Item(NamedTuple):
    """An item of a collection.

    - `name`: the path relative to the folder, separated by "/", or the line number.
    - `size`: the size in bytes.
    - `stamp`: the modification time in ns, or a hash of the text.
    - `start`: the offset of the line in a text file.
    - `text`: the text that the gallery displays, possibly truncated.

    Two items are the same if `name`, `size` and `stamp` are equal.
    """

    name: str
    size: int
    stamp: int
    start: int = 0
    text: str | None = None


def item_line(item: Item) -> bytes:
    """Serialize an item as one line of ASCII, including the newline. The name may contain line
    breaks and bytes that are not UTF-8."""
    fields = item if item.start or item.text is not None else item[:3]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def parse_item(line: bytes) -> Item:
    """Inverse of `item_line`. Raises ValueError for any other line."""
    try:
        item = Item(*json.loads(line))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is not an item") from error
    if not (isinstance(item.name, str) and isinstance(item.size, int) and _is_int(item.stamp)):
        raise ValueError(f"{line[:80]!r} is not an item")
    return item


def _is_int(value: object) -> bool:
    return isinstance(value, int)

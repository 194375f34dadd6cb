"""Paths of what has a name of its own."""

from urllib.parse import quote


def path_of(kind: str, name: str) -> str:
    """`/v1/KIND/NAME`. Raises ValueError for a name that would make it the path of another."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} names nothing of /v1/{kind}: give a name, or an id")
    return f"/v1/{kind}/{quote(name, safe='')}"

"""A query: its fields, the requests that a server's limits allow, and their answers as one."""

import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar
from urllib.parse import quote

from serving.client.ndjson import Input
from serving.client.responses import Limits
from serving.schemas import Answer

# What a request adds to each of its pictures or texts, generously.
_EXTRA_BYTES = 1000
_PLACE = re.compile(r"^(images|texts)\[(\d{1,9})\]")
Kind = TypeVar("Kind")


def question(
    classes: Iterable[str | SupportsIndex], recall: float | None, threshold: float | None
) -> dict[str, Any]:
    """The fields of a question, as JSON has them.

    Raises TypeError for classes that are no list, and for one that is no name and no number.
    """
    numbers = {"recall": recall, "threshold": threshold}
    given = {name: number for name, number in numbers.items() if number is not None}
    return {"classes": [_class(one) for one in several("classes", classes)], **given}


def several(what: str, given: Iterable[Kind]) -> Iterable[Kind]:
    """What is given; TypeError for a single one, which Python would take apart."""
    if isinstance(given, str | bytes | bytearray | Path):
        raise TypeError(f"{what} is one {type(given).__name__}: give a list")
    return given


def in_text(fields: dict[str, Any]) -> dict[str, Any]:
    """A question for URLs and forms, which know no numbers."""
    names = [f"#{one}" if isinstance(one, int) else one for one in fields["classes"]]
    return fields | {"classes": names}


def requests(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The inputs in requests that the server's limits allow, as httpx sends them, one at a time,
    each after the place of its first input."""
    held: list[tuple[str, bytes] | str] = []
    size = 0
    for place, one in enumerate(inputs):
        part = one if isinstance(one, str) else _file(one)
        added = _EXTRA_BYTES + (len(json.dumps(part)) if isinstance(part, str) else len(part[1]))
        if held and (len(held) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield place - len(held), _request(fields, held)
            held, size = [], 0
        held.append(part)
        size += added
    yield len(inputs) - len(held), _request(fields, held)


def joined(parts: Sequence[Answer]) -> Answer:
    """One answer about all inputs, whose positions count through the parts."""
    results = [result for part in parts for result in part.results]
    numbered = [result.model_copy(update={"input": place}) for place, result in enumerate(results)]
    return parts[0].model_copy(update={"results": numbered})


def counted_from(first: int, reason: str) -> str:
    """A server's "images[1]: …" about a part whose first input has the place `first` of all."""
    return _PLACE.sub(lambda found: f"{found[1]}[{first + int(found[2])}]", reason)


def _class(one: str | SupportsIndex) -> str | int:
    if isinstance(one, str):
        return one
    if isinstance(one, bool) or not isinstance(one, SupportsIndex):
        raise TypeError(f"a class is a name or a number, and not {one!r}")
    return operator.index(one)


def _file(picture: Path | bytes) -> tuple[str, bytes]:
    if isinstance(picture, bytes):
        return "picture", picture
    return picture.name, picture.read_bytes()


def _request(fields: dict[str, Any], held: Sequence[tuple[str, bytes] | str]) -> dict[str, Any]:
    """Texts go as JSON, pictures as the files of a form."""
    if isinstance(held[0], str):
        content = json.dumps({**fields, "texts": held})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": in_text(fields), "files": [("images", file) for file in held]}


def path_of(kind: str, name: str) -> str:
    """`/v1/KIND/NAME`. Raises ValueError for a name that would make it the path of another."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} names nothing of /v1/{kind}: give a name, or an id")
    return f"/v1/{kind}/{quote(name, safe='')}"

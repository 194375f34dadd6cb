"""A question: its fields, the requests that a server's limits allow, and their answers as one."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serving.client.lines import Input
from serving.client.said import Limits
from serving.verdicts import Answer

# What a request adds to each of its pictures or texts, generously.
_EXTRA_BYTES = 1000


def question(
    classes: Sequence[str | int], recall: float | None, threshold: float | None
) -> dict[str, Any]:
    """The fields of a question, as JSON has them."""
    numbers = {"recall": recall, "threshold": threshold}
    given = {name: number for name, number in numbers.items() if number is not None}
    return {"classes": list(classes), **given}


def as_text(classes: Sequence[str | int]) -> list[str]:
    """Classes for URLs and forms, which know no numbers."""
    return [f"#{one}" if isinstance(one, int) else one for one in classes]


def requests(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[dict[str, Any]]:
    """The inputs in requests that the server's limits allow, as httpx sends them, one at a time."""
    held: list[tuple[str, bytes] | str] = []
    size = 0
    for one in inputs:
        part = one if isinstance(one, str) else _file(one)
        added = _EXTRA_BYTES + (len(json.dumps(part)) if isinstance(part, str) else len(part[1]))
        if held and (len(held) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield _request(fields, held)
            held, size = [], 0
        held.append(part)
        size += added
    yield _request(fields, held)


def joined(parts: Sequence[Answer]) -> Answer:
    """One answer about all inputs, whose positions count through the parts."""
    results = [result for part in parts for result in part.results]
    numbered = [result.model_copy(update={"input": place}) for place, result in enumerate(results)]
    return parts[0].model_copy(update={"results": numbered})


def _file(picture: Path | bytes) -> tuple[str, bytes]:
    if isinstance(picture, bytes):
        return "picture", picture
    return picture.name, picture.read_bytes()


def _request(fields: dict[str, Any], held: Sequence[tuple[str, bytes] | str]) -> dict[str, Any]:
    """Texts go as JSON, pictures as the files of a form."""
    if isinstance(held[0], str):
        content = json.dumps({**fields, "texts": held})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": fields, "files": [("images", file) for file in held]}

"""The client of a server, with one method per operation."""

import json
import operator
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from pydantic import BaseModel

from serving.client.transport import Body, RejectedError, Transport
from serving.schemas import (
    Answer,
    Classification,
    ClassPage,
    GalleryFound,
    GalleryList,
    Hits,
    Limits,
    Required,
)

_ATTEMPTS = 3
# Generous estimate of the overhead, in bytes, of each image or text in a request.
_EXTRA_BYTES = 1000
_POSITION = re.compile(r"^(images|texts)\[(\d{1,9})\]")
Input = Path | bytes | str
Results = TypeVar("Results", Answer, Classification)


class Served(BaseModel):
    """The model that a server serves."""

    reads: Literal["images", "texts"]
    recalls: list[float]
    limits: Limits


class RuleOptions(TypedDict, total=False):
    """How a query decides: a `recall` or a `threshold`. With `require`, there are no verdicts on
    classes whose threshold for the recall is not guaranteed."""

    recall: float | None
    threshold: float | None
    require: Required | None


class Client(Transport):
    """A client for the server at `url`.

    - `timeout`: the idle timeout of a connection, in seconds.
    - `retry_seconds`: how long to keep retrying a request that fails with a transient error, in
      seconds.

    Classes are names or ids (including numpy integers), images are paths or bytes, and texts are
    strings. Not thread-safe.

    Every method raises RejectedError if the server rejects the request, OSError if there is no
    response, TypeError for an invalid class or input, and ValueError for an invalid name or id.
    Requests are retried only if the server has responded before: if nothing is listening at `url`,
    the first request fails immediately.
    """

    def served(self) -> Served:
        """Return a description of the model that the server serves."""
        return self.request(Served, "GET", "/v1/model")

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassPage:
        """Return the classes whose names contain `search`. Names that begin with it come first."""
        parameters = {"search": search, "limit": limit, "offset": offset}
        return self.request(ClassPage, "GET", "/v1/classes", params=parameters)

    def query(
        self,
        classes: Iterable[str | SupportsIndex],
        inputs: Iterable[Input],
        *,
        served: Served | None = None,
        **rule: Unpack[RuleOptions],
    ) -> Answer:
        """Check whether each input belongs to each of the classes. Pass the result of `served()` as
        `served` to save a request.

        Splits the inputs into several requests if the server's limits require it, and sends one
        request at a time. Raises TypeError or ValueError for invalid inputs before any input is
        sent.
        """
        fields = {"classes": _classes(classes), **_present(rule)}
        return self._answered(Answer, "/v1/query", fields, inputs, served)

    def classify(
        self,
        inputs: Iterable[Input],
        *,
        top: int = 5,
        served: Served | None = None,
        **rule: Unpack[RuleOptions],
    ) -> Classification:
        """Find the `top` classes with the largest scores for each input and, with a recall or
        threshold, whether they match. Splits the inputs and raises exceptions like `query`."""
        fields = {"top": top, **_present(rule)}
        return self._answered(Classification, "/v1/classify", fields, inputs, served)

    def galleries(self) -> list[GalleryFound]:
        """Return the galleries of the server."""
        return self.request(GalleryList, "GET", "/v1/galleries").galleries

    def search_page(
        self,
        gallery: str,
        classes: Iterable[str | SupportsIndex],
        *,
        exact: bool | None = None,
        limit: int = 20,
        offset: int = 0,
        **rule: Unpack[RuleOptions],
    ) -> Hits:
        """Return up to `limit` hits for each class, starting at `offset`, and each class's total
        number of hits."""
        if gallery in ("", ".", ".."):  # these would change the path
            raise ValueError(f"{gallery!r} is not a valid name or id for /v1/galleries")
        page = {"exact": exact, "limit": limit, "offset": offset}
        body = {"classes": _classes(classes), **_present(rule), **_present(page)}
        path = f"/v1/galleries/{quote(gallery, safe='')}/search"
        return self._post(Hits, path, body)

    def _post(self, kind: type[Body], path: str, body: dict[str, Any]) -> Body:
        # httpx would raise errors of its own for values that the server rejects.
        json_type = {"Content-Type": "application/json"}
        return self.request(kind, "POST", path, content=json.dumps(body), headers=json_type)

    def _answered(
        self,
        model: type[Results],
        path: str,
        fields: dict[str, Any],
        inputs: Iterable[Input],
        served: Served | None,
    ) -> Results:
        """Send all parts of a query. If the server switches to another version of the model or to
        other thresholds in the meantime, send them again, because an answer must not mix them.
        Raises OSError if this happens too often."""
        inputs = list(_not_single("inputs", inputs))
        served = self.served() if served is None else served
        self._check(inputs, served)
        for _ in range(_ATTEMPTS):
            parts = []
            for first, body in _bodies(fields, inputs, served.limits):
                try:
                    parts.append(self._post(model, path, body))
                except RejectedError as error:
                    reason = error.reason
                    # The position of an input in this request, such as "images[1]: …", becomes that
                    # in the query.
                    if found := _POSITION.match(reason):
                        position = first + int(found[2])
                        reason = f"{found[1]}[{position}]{reason[found.end() :]}"
                    raise RejectedError(self.url, error.status, error.code, reason) from None
            states = {(part.version, str(getattr(part, "thresholds", ""))) for part in parts}
            if len(states) == 1:
                return joined(parts)
        raise OSError(f"the model at {self.url} changed during each of {_ATTEMPTS} queries")

    def _check(self, inputs: Sequence[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there are no inputs: pass images or texts")
        for one in inputs:
            if not isinstance(one, Path | bytes | str):
                raise TypeError(f"an input must be a Path, bytes or str, got {type(one).__name__}")
            if isinstance(one, str) != (served.reads == "texts"):
                raise ValueError(
                    f"the model at {self.url} reads {served.reads}: pass {served.reads}"
                )


def joined(parts: Sequence[Results]) -> Results:
    """Merge the answers to several requests, numbering the inputs consecutively."""
    results = [result for part in parts for result in part.results]
    numbered = [
        result.model_copy(update={"input": position}) for position, result in enumerate(results)
    ]
    return parts[0].model_copy(update={"results": numbered})


def _classes(classes: Iterable[str | SupportsIndex]) -> list[str | int]:
    """Return names and ids for JSON. Raises TypeError for a single string, or for values other than
    names and ids."""
    found: list[str | int] = []
    for one in _not_single("classes", classes):
        if isinstance(one, bool) or not isinstance(one, str | SupportsIndex):
            raise TypeError(f"a class must be a name or an id, got {one!r}")
        found.append(one if isinstance(one, str) else operator.index(one))
    return found


def _not_single(name: str, value: Iterable[Any]) -> Iterable[Any]:
    """Return `value`. Raises TypeError for a single string, bytes or path, because the caller
    probably meant a list."""
    if isinstance(value, str | bytes | bytearray | Path):
        raise TypeError(f"{name} is a single {type(value).__name__}: pass a list")
    return value


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _bodies(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Split the inputs into requests within the server's limits. Yields, for each request, the
    position of its first input and its body."""
    name = "texts" if isinstance(inputs[0], str) else "images"
    batch: list[str] = []
    size = 0
    for position, one in enumerate(inputs):
        if isinstance(one, Path):
            one = one.read_bytes()
        sent = one if isinstance(one, str) else b64encode(one).decode()
        added = len(json.dumps(sent)) + _EXTRA_BYTES
        if batch and (len(batch) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield position - len(batch), {**fields, name: batch}
            batch, size = [], 0
        batch.append(sent)
        size += added
    yield len(inputs) - len(batch), {**fields, name: batch}

"""The client of a server, with one method per operation."""

from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, SupportsIndex

import httpx

from serving.client.galleries import GalleryQueries
from serving.client.messages import (
    ClassesFound,
    RejectedError,
    Results,
    Served,
    as_text_fields,
    check_iterable,
    joined,
    query_fields,
    renumbered,
    requests,
)
from serving.client.ndjson import (
    NDJSON,
    STREAM_EVENTS,
    Input,
    Item,
    StreamEvent,
    check_input,
    lines_of,
)
from serving.client.transport import Transport
from serving.client.watches import StandingQueries
from serving.schemas import (
    Answer,
    Classification,
    ModelFound,
    ModelList,
    Reloaded,
    ReloadResult,
)

# Loading a bundle can take minutes.
_RELOAD_SECONDS = 3600.0
_ATTEMPTS = 3


class Client(StandingQueries, GalleryQueries):
    """A client for the server at `url`.

    - `model`: the name of the model, by default the default model of the server.
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

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        model: str | None = None,
        timeout: float = 60,
        retry_seconds: float = 60,
    ) -> None:
        """Raises ValueError for an invalid URL, token or name. Does not connect yet."""
        super().__init__(Transport(url, token, timeout, retry_seconds, model), timeout)

    @property
    def url(self) -> str:
        return self._transport.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections except those of open streams and listeners. To close a stream or
        listener, close its generator."""
        self._transport.close()

    def served(self) -> Served:
        """Return a description of the model that the server serves. Raises RejectedError and
        OSError."""
        return self._transport.request(Served, "GET", "/v1/model")

    def models(self) -> list[ModelFound]:
        """Return the models of the server. Raises RejectedError and OSError."""
        return self._transport.request(ModelList, "GET", "/v1/models").models

    def reload(self) -> list[Reloaded]:
        """Load the published version of each model now. `token` must be that of an administrator.

        Raises RejectedError, with status 409 if a published bundle cannot be served, and OSError.
        """
        limits = httpx.Timeout(self._timeout, read=_RELOAD_SECONDS)
        path = "/v1/admin/reload"
        return self._transport.request(ReloadResult, "POST", path, timeout=limits).models

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassesFound:
        """Return the classes whose names contain `search`. Names that begin with it come first.

        Raises RejectedError and OSError.
        """
        parameters = {"search": search, "limit": limit, "offset": offset}
        return self._transport.request(ClassesFound, "GET", "/v1/classes", params=parameters)

    def query(
        self,
        classes: Iterable[str | SupportsIndex],
        inputs: Iterable[Input],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        served: Served | None = None,
    ) -> Answer:
        """Check whether each input belongs to each of the classes. Pass the result of `served()` as
        `served` to save a request.

        Splits the inputs into several requests if the server's limits require it, and sends one
        request at a time. Raises RejectedError and OSError. Raises TypeError or ValueError for
        invalid inputs before any input is sent.
        """
        fields, inputs = (
            query_fields(classes, recall, threshold),
            list(check_iterable("inputs", inputs)),
        )
        served = self.served() if served is None else served
        self._check(inputs, served)
        limits = served.limits
        return self._joined(Answer, "/v1/query", lambda: requests(fields, inputs, limits))

    def classify(
        self, inputs: Iterable[Input], *, top: int = 5, served: Served | None = None
    ) -> Classification:
        """Find the `top` classes with the largest scores for each input. Pass the result of
        `served()` as `served` to save a request.

        Splits the inputs and raises exceptions like `query`.
        """
        inputs = list(check_iterable("inputs", inputs))
        served = self.served() if served is None else served
        self._check(inputs, served)
        fields, limits = {"top": top}, served.limits
        return self._joined(
            Classification, "/v1/classify", lambda: requests(fields, inputs, limits)
        )

    def stream(
        self,
        classes: Iterable[str | SupportsIndex],
        inputs: Iterable[Input | Item],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        all: bool = False,
    ) -> Generator[StreamEvent, None, None]:
        """Check whether each input belongs to each of the classes. Results arrive in order while
        more inputs are sent. The request is sent when the first result is read.

        Yields a `Hit` for each input that matches a class (or, if `all`, for every input), a
        `LineError` for each rejected input and, at the end, `Done`. A result has the same `id` as
        its `Item`; the default id is the zero-based position of the input. The error for a line
        that is too long has no id.

        Once the server has accepted the stream, a separate thread iterates over `inputs`, but only
        while you read the results. The server closes the stream if you stop reading for a minute.
        Raises RejectedError, OSError if there is no response, ConnectionError if the connection is
        lost, and whatever `inputs` raises. A stream that has started is not retried.
        """
        parameters = as_text_fields(query_fields(classes, recall, threshold))
        return self._transport.stream_events(
            STREAM_EVENTS,
            "POST",
            "/v1/query:stream",
            params=parameters | ({"all": True} if all else {}),
            content=lines_of(check_iterable("inputs", inputs)),
            headers={"Content-Type": NDJSON},
        )

    def _joined(
        self,
        model: type[Results],
        path: str,
        make_requests: Callable[[], Iterator[tuple[int, dict[str, Any]]]],
    ) -> Results:
        """Send all parts of a query. If the server switches to another version of the model in the
        meantime, send them again, because an answer must not mix versions. Raises OSError if this
        happens too often."""
        for _ in range(_ATTEMPTS):
            parts = [self._part(model, path, *request) for request in make_requests()]
            if len({part.version for part in parts}) == 1:
                return joined(parts)
        raise OSError(f"the model at {self.url} changed during each of {_ATTEMPTS} queries")

    def _part(
        self, model: type[Results], path: str, first: int, request: dict[str, Any]
    ) -> Results:
        """Send one part of a query. `first` is the position of the part's first input."""
        try:
            return self._transport.request(model, "POST", path, **request)
        except RejectedError as error:
            reason = renumbered(first, error.reason)
            raise RejectedError(self.url, error.status, error.code, reason) from None

    def _check(self, inputs: list[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there are no inputs: pass images or texts")
        for position, one in enumerate(inputs):
            check_input(one)
            if isinstance(one, str) != (served.reads == "texts"):
                raise ValueError(
                    f"the model at {self.url} reads {served.reads}: pass {served.reads}"
                )
            if isinstance(one, str) and len(one) > served.limits.max_text_chars:
                raise ValueError(
                    f"texts[{position}] ({one[:60].strip()}…) has {len(one)} characters, but "
                    f"{self.url} accepts at most {served.limits.max_text_chars}: shorten the text"
                )

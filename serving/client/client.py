"""The client of a server, with one method per operation."""

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self, SupportsIndex

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
from serving.schemas import Answer, Classification


class Client(StandingQueries, GalleryQueries):
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

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60, retry_seconds: float = 60
    ) -> None:
        """Raises ValueError for an invalid URL or token. Does not connect yet."""
        super().__init__(Transport(url, token, timeout, retry_seconds), timeout)

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
        parts = requests(fields, inputs, served.limits)
        return joined([self._part(Answer, "/v1/query", *request) for request in parts])

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
        parts = requests({"top": top}, inputs, served.limits)
        return joined([self._part(Classification, "/v1/classify", *request) for request in parts])

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

"""The client of a server, with one method per operation."""

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self, SupportsIndex

from serving.client.messages import (
    ClassesFound,
    RefusedError,
    Served,
    as_text_fields,
    check_iterable,
    joined,
    path_of,
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
from serving.schemas import Answer, ClassHits, GalleryFound, GalleryHit, GalleryList, Hits


class Client(StandingQueries):
    """A server at `url`. `timeout`: seconds that a connection may be idle. `patience`: seconds
    after which a request is not retried any more.

    Every method raises RefusedError for a request that the server rejects, OSError if there is no
    response, TypeError for an invalid class or input, and ValueError for an invalid name or id. If
    nothing listens at the first request, it fails immediately: requests are retried only for
    servers that have responded before. Classes are names or numbers (including numpy integers);
    images are files or their bytes; texts are strings. Not thread-safe.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60, patience: float = 60
    ) -> None:
        """Sends nothing yet. Raises ValueError for an invalid URL or token."""
        super().__init__(Transport(url, token, timeout, patience), timeout)

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
        """Close the connections, except those of streams and listeners in progress: close their
        generators."""
        self._transport.close()

    def served(self) -> Served:
        """The model that the server serves. Raises RefusedError and OSError."""
        return self._transport.request(Served, "GET", "/v1/model")

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassesFound:
        """Classes whose names contain `search`; those that begin with it come first.

        Raises RefusedError and OSError.
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
        """Is each input of these classes? Pass the result of `served()` as `served` to save a
        request.

        Sends as many requests as the server's limits require, one at a time. Raises RefusedError
        and OSError. Raises TypeError and ValueError for inputs of the wrong kind, before sending
        any.
        """
        fields, inputs = (
            query_fields(classes, recall, threshold),
            list(check_iterable("inputs", inputs)),
        )
        served = self.served() if served is None else served
        self._check(inputs, served)
        return joined([self._part(*request) for request in requests(fields, inputs, served.limits)])

    def stream(
        self,
        classes: Iterable[str | SupportsIndex],
        inputs: Iterable[Input | Item],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        all: bool = False,
    ) -> Generator[StreamEvent, None, None]:
        """Is each input of these classes? Inputs are answered in order while more are sent. Nothing
        is sent until the first answer is requested, for example with `next`.

        Yields a `Hit` for each input with a match, or for `all` inputs, a `LineError` for each
        rejected input, and finally `Done`. Their `id` is that of the `Item` or, without one, the
        position of the input, from 0. A line that is too long has no id.

        Another thread iterates over `inputs`, once the server has accepted the stream and while you
        read the answers; do not stop reading them for a minute. Raises RefusedError; OSError if
        there is no response; ConnectionError if the stream breaks off; and what `inputs` raises. A
        stream that has begun is not retried.
        """
        asked = as_text_fields(query_fields(classes, recall, threshold))
        return self._transport.stream_events(
            STREAM_EVENTS,
            "POST",
            "/v1/query:stream",
            params=asked | ({"all": True} if all else {}),
            content=lines_of(check_iterable("inputs", inputs)),
            headers={"Content-Type": NDJSON},
        )

    def galleries(self) -> list[GalleryFound]:
        """The galleries that can be searched. Raises RefusedError and OSError."""
        return self._transport.request(GalleryList, "GET", "/v1/galleries").galleries

    def search(
        self,
        gallery: str,
        class_name: str | SupportsIndex,
        *,
        recall: float | None = None,
        threshold: float | None = None,
        page_size: int = 100,
    ) -> Generator[GalleryHit, None, None]:
        """All items in descending order of the class's score or, with a recall or threshold, those
        that match. Fetched in pages of `page_size` hits as they are read.

        Raises RefusedError and OSError; OSError also if the gallery changes meanwhile.
        """

        def found(offset: int) -> ClassHits:
            return self.search_page(
                gallery,
                [class_name],
                recall=recall,
                threshold=threshold,
                limit=page_size,
                offset=offset,
            ).results[0]

        first = here = found(0)
        read = 0
        while here.hits:
            yield from here.hits
            read += len(here.hits)
            if read >= first.total:
                return
            here = found(read)
            if (here.total, here.threshold) != (first.total, first.threshold):
                raise OSError(f"gallery {gallery} at {self.url} has changed: search it again")

    def search_page(
        self,
        gallery: str,
        classes: Iterable[str | SupportsIndex],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> Hits:
        """For each class, `limit` hits after the first `offset`, and the total number.

        Raises RefusedError and OSError.
        """
        body = query_fields(classes, recall, threshold) | {"limit": limit, "offset": offset}
        return self._transport.request(
            Hits, "POST", f"{path_of('galleries', gallery)}/search", json=body
        )

    def _part(self, first: int, request: dict[str, Any]) -> Answer:
        """The answer to one part of a query; `first` is the position of its first input."""
        try:
            return self._transport.request(Answer, "POST", "/v1/query", **request)
        except RefusedError as error:
            reason = renumbered(first, error.reason)
            raise RefusedError(self.url, error.status, error.code, reason) from None

    def _check(self, inputs: list[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there is nothing to ask about: give images or texts")
        for position, one in enumerate(inputs):
            check_input(one)
            if isinstance(one, str) != (served.reads == "texts"):
                remedy = "name image files" if served.reads == "images" else "give texts"
                raise ValueError(f"{self.url} reads {served.reads}: {remedy}")
            if isinstance(one, str) and len(one) > served.limits.max_text_chars:
                raise ValueError(
                    f"texts[{position}] ({one[:60].strip()}…) has {len(one)} characters, and "
                    f"{self.url} takes {served.limits.max_text_chars}: shorten it"
                )

"""The client of a server, with one method per operation."""

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self, SupportsIndex

from serving.client.messages import (
    ClassesFound,
    RejectedError,
    Results,
    Served,
    as_text_fields,
    check_iterable,
    joined,
    json_inputs,
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
from serving.schemas import (
    Answer,
    ClassHits,
    Classification,
    ExampleHits,
    GalleryFound,
    GalleryHit,
    GalleryItem,
    GalleryList,
    Hits,
    InsertedItems,
)


class Client(StandingQueries):
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

    def galleries(self) -> list[GalleryFound]:
        """Return the galleries of the server. Raises RejectedError and OSError."""
        return self._transport.request(GalleryList, "GET", "/v1/galleries").galleries

    def search(
        self,
        gallery: str,
        class_name: str | SupportsIndex,
        *,
        recall: float | None = None,
        threshold: float | None = None,
        exact: bool | None = None,
        page_size: int = 100,
    ) -> Generator[GalleryHit, None, None]:
        """Yield the items in descending order of their score for the class. If a recall or
        threshold is set, yield only the items that match. Hits are fetched in pages of `page_size`
        as you read them.

        If the gallery has an index, the server uses it unless `exact` is true, and the search ends
        after 1000 hits. Raises RejectedError and OSError. OSError is also raised if the gallery
        changes during the search.
        """

        def fetch(offset: int) -> ClassHits:
            return self.search_page(
                gallery,
                [class_name],
                recall=recall,
                threshold=threshold,
                exact=exact,
                limit=page_size,
                offset=offset,
            ).results[0]

        first = page = fetch(0)
        read = 0
        while page.hits:
            yield from page.hits
            read += len(page.hits)
            if read >= first.total:
                return
            page = fetch(read)
            if (page.total, page.threshold) != (first.total, first.threshold):
                raise OSError(
                    f"gallery {gallery} at {self.url} changed during the search: search again"
                )

    def search_page(
        self,
        gallery: str,
        classes: Iterable[str | SupportsIndex],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        exact: bool | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> Hits:
        """Return up to `limit` hits for each class, starting at `offset`, and each class's total
        number of hits.

        Raises RejectedError and OSError.
        """
        body = query_fields(classes, recall, threshold) | {"limit": limit, "offset": offset}
        return self._search(gallery, body, exact)

    def search_similar(
        self,
        gallery: str,
        examples: Iterable[str],
        *,
        threshold: float | None = None,
        exact: bool | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> list[ExampleHits]:
        """Return, for each example, up to `limit` items whose features have the largest cosines
        with those of the example, starting at `offset`. Examples are ids of items of the gallery.

        Raises RejectedError and OSError.
        """
        body: dict[str, Any] = {"examples": list(check_iterable("examples", examples))}
        body |= {"limit": limit, "offset": offset}
        body |= {} if threshold is None else {"threshold": threshold}
        return self._search(gallery, body, exact).examples

    def insert_items(
        self, gallery: str, inputs: Iterable[Input], *, names: Iterable[str] | None = None
    ) -> list[GalleryItem]:
        """Insert images or texts into a gallery, all or none, in one request. `names` are unique;
        by default, an item is named after its id.

        The request is sent once. Raises RejectedError. Raises OSError if it is unknown whether the
        items were inserted.
        """
        inputs = list(check_iterable("inputs", inputs))
        body = json_inputs(inputs)
        if names is not None:
            body["names"] = list(check_iterable("names", names))
        path = f"{path_of('galleries', gallery)}/items"
        response = self._transport.request_once("POST", path, json=body)
        return self._transport.read(response, InsertedItems).items

    def delete_item(self, gallery: str, item_id: str) -> None:
        """Delete an item from a gallery.

        The request is sent once. Raises RejectedError. Raises OSError if it is unknown whether the
        item was deleted.
        """
        path = f"{path_of('galleries', gallery)}{path_of('items', item_id).removeprefix('/v1')}"
        self._transport.request_once("DELETE", path)

    def _search(self, gallery: str, body: dict[str, Any], exact: bool | None) -> Hits:
        body |= {} if exact is None else {"exact": exact}
        return self._transport.request(
            Hits, "POST", f"{path_of('galleries', gallery)}/search", json=body
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

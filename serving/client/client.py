"""What a server does, as methods."""

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
    question,
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
    """A server at `url`. `timeout` is how many seconds a connection may stand still; when one
    request has been tried for `patience` seconds it is not tried anew.

    Every method raises RefusedError for a request that the server rejects, OSError if there is no
    answer, TypeError for what is not a class or an input, and ValueError for an invalid name or id.
    If nothing listens at the first request, it fails at once: `patience` is for servers that have
    answered before. Classes are names, or numbers (of numpy, too); images are files or their bytes,
    texts are strings. Not thread-safe.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60, patience: float = 60
    ) -> None:
        """Asks nothing yet. Raises ValueError for what is no URL, and for what is no token."""
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
        """Hang up. Streams and listeners that are read meanwhile have a `close` of their own."""
        self._transport.close()

    def served(self) -> Served:
        """What the server serves. Raises RefusedError and OSError."""
        return self._transport.request(Served, "GET", "/v1/model")

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassesFound:
        """Classes whose names contain `search`; those that begin with it first.

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
        """Is each input of these classes? `served`: what `served()` has said; else it is asked.

        As many requests as the server's limits ask for, one at a time. Raises RefusedError,
        OSError, and TypeError and ValueError for inputs of the wrong kind, before any is sent.
        """
        fields, inputs = (
            question(classes, recall, threshold),
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
        """Is each input of these classes? Answered in their order while more are sent; nothing is
        sent before the first answer is asked for, as by `next`.

        Gives a `Hit` for each input with a match, or for `all` of them, a `LineError` for each that
        is refused, and `Done` at the end. Their `id` is that of the `Item` or, without one, the
        input's place, from 0; a line that is too long has none.

        `inputs` are taken one by one by another thread, once the server has accepted the stream,
        and while the answers are read: do not leave those alone for a minute. Raises RefusedError;
        OSError where there is no answer; ConnectionError where it breaks off; and what `inputs`
        raises. A stream that has begun is not sent again.
        """
        asked = as_text_fields(question(classes, recall, threshold))
        return self._transport.stream_events(
            STREAM_EVENTS,
            "POST",
            "/v1/query:stream",
            params=asked | ({"all": True} if all else {}),
            content=lines_of(check_iterable("inputs", inputs)),
            headers={"Content-Type": NDJSON},
        )

    def galleries(self) -> list[GalleryFound]:
        """The collections that can be searched. Raises RefusedError and OSError."""
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
        """All items of the class, or those that match, from the highest score on; fetched by pages
        of `page_size` hits as they are read.

        Raises RefusedError, and OSError also where the gallery changes meanwhile.
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
        """Of each class `limit` hits after the first `offset`, with how many there are.

        Raises RefusedError and OSError.
        """
        body = question(classes, recall, threshold) | {"limit": limit, "offset": offset}
        return self._transport.request(
            Hits, "POST", f"{path_of('galleries', gallery)}/search", json=body
        )

    def _part(self, first: int, request: dict[str, Any]) -> Answer:
        """The answer to a part of a question, whose first input has this place of all."""
        try:
            return self._transport.request(Answer, "POST", "/v1/query", **request)
        except RefusedError as error:
            reason = renumbered(first, error.reason)
            raise RefusedError(self.url, error.status, error.code, reason) from None

    def _check(self, inputs: list[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there is nothing to ask about: give pictures or texts")
        for position, one in enumerate(inputs):
            check_input(one)
            if isinstance(one, str) != (served.reads == "texts"):
                remedy = "name picture files" if served.reads == "pictures" else "give texts"
                raise ValueError(f"{self.url} reads {served.reads}: {remedy}")
            if isinstance(one, str) and len(one) > served.limits.max_text_chars:
                raise ValueError(
                    f"texts[{position}] ({one[:60].strip()}…) has {len(one)} characters, and "
                    f"{self.url} takes {served.limits.max_text_chars}: shorten it"
                )

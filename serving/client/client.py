"""The client of a server, with one method per operation."""

from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

from serving.client.messages import (
    ClassesFound,
    Input,
    RejectedError,
    Results,
    Served,
    check_input,
    check_iterable,
    joined,
    path_of,
    present,
    query_fields,
    renumbered,
    requests,
)
from serving.client.transport import Transport
from serving.schemas import (
    Answer,
    ClassHits,
    Classification,
    GalleryFound,
    GalleryHit,
    GalleryList,
    Hits,
)

_ATTEMPTS = 3


class Client:
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
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60,
        retry_seconds: float = 60,
    ) -> None:
        """Raises ValueError for an invalid URL or token. Does not connect yet."""
        self._transport = Transport(url, token, timeout, retry_seconds)

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
        """Close all connections."""
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
        require: Literal["guaranteed"] | None = None,
        served: Served | None = None,
    ) -> Answer:
        """Check whether each input belongs to each of the classes. Pass the result of `served()` as
        `served` to save a request. With `require`, there are no verdicts on classes whose threshold
        for the recall is not guaranteed.

        Splits the inputs into several requests if the server's limits require it, and sends one
        request at a time. Raises RejectedError and OSError. Raises TypeError or ValueError for
        invalid inputs before any input is sent.
        """
        fields, inputs = (
            query_fields(classes, recall=recall, threshold=threshold, require=require),
            list(check_iterable("inputs", inputs)),
        )
        served = self.served() if served is None else served
        self._check(inputs, served)
        limits = served.limits
        return self._joined(Answer, "/v1/query", lambda: requests(fields, inputs, limits))

    def classify(
        self,
        inputs: Iterable[Input],
        *,
        top: int = 5,
        recall: float | None = None,
        threshold: float | None = None,
        require: Literal["guaranteed"] | None = None,
        served: Served | None = None,
    ) -> Classification:
        """Find the `top` classes with the largest scores for each input and, with a recall or
        threshold, whether they match. Pass the result of `served()` as `served` to save a request.

        Splits the inputs and raises exceptions like `query`.
        """
        inputs = list(check_iterable("inputs", inputs))
        served = self.served() if served is None else served
        self._check(inputs, served)
        rule = {"recall": recall, "threshold": threshold, "require": require}
        fields, limits = {"top": top, **present(rule)}, served.limits
        return self._joined(
            Classification, "/v1/classify", lambda: requests(fields, inputs, limits)
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
        exact: bool | None = True,
        page_size: int = 100,
    ) -> Generator[GalleryHit, None, None]:
        """Yield the items in descending order of their score for the class. If a recall or
        threshold is set, yield only the items that match. Hits are fetched in pages of `page_size`
        as you read them.

        If `exact` is false, the server uses the gallery's index, if there is one, and the search
        ends after 100 hits. Raises RejectedError and OSError. OSError is also raised if the gallery
        changes during the search.
        """

        def fetch(offset: int) -> tuple[str | None, ClassHits]:
            page = self.search_page(
                gallery,
                [class_name],
                recall=recall,
                threshold=threshold,
                exact=exact,
                limit=page_size,
                offset=offset,
            )
            return page.version, page.results[0]

        version, first = fetch(0)
        page, read = first, 0
        while page.hits:
            yield from page.hits
            read += len(page.hits)
            if read >= first.total:
                return
            now, page = fetch(read)
            if (now, page.total, page.threshold) != (version, first.total, first.threshold):
                raise OSError(
                    f"gallery {gallery} at {self._transport.url} changed during the search: "
                    "search again"
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
        body = query_fields(classes, recall=recall, threshold=threshold)
        body |= present({"exact": exact, "limit": limit, "offset": offset})
        return self._transport.request(
            Hits, "POST", path_of("galleries", gallery, "search"), json=body
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

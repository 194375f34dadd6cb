"""What a server does, as methods."""

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import quote

from serving.client.asking import Asking
from serving.client.lines import NDJSON, STREAMED, Input, Item, Streamed, lines_of
from serving.client.parts import as_text, joined, question, requests
from serving.client.said import ClassesFound, GalleriesFound, GalleryFound, Served
from serving.client.standing import StandingQueries
from serving.galleries.hits import ClassHits, Hits
from serving.galleries.hits import Hit as GalleryHit
from serving.verdicts import Answer


class Client(StandingQueries):
    """A server at `url`. `timeout` is how many seconds a connection may stand still, `patience` how
    many one request is tried, pauses included.

    Every method raises RefusedError for what the server refuses for good, and OSError where it has
    no answer within the patience. Classes are names, or numbers; pictures are files or their bytes,
    texts are strings. Not for several threads at once.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60, patience: float = 60
    ) -> None:
        """Asks nothing yet. Raises ValueError for what is no URL."""
        super().__init__(Asking(url, token, timeout, patience), timeout)

    @property
    def url(self) -> str:
        return self._asking.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._asking.close()

    def served(self) -> Served:
        """What the server serves. Raises RefusedError and OSError."""
        return self._asking.ask(Served, "GET", "/v1/model")

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassesFound:
        """Classes whose names contain `search`; those that begin with it first.

        Raises RefusedError and OSError.
        """
        parameters = {"search": search, "limit": limit, "offset": offset}
        return self._asking.ask(ClassesFound, "GET", "/v1/classes", params=parameters)

    def query(
        self,
        classes: Sequence[str | int],
        inputs: Sequence[Input],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        served: Served | None = None,
    ) -> Answer:
        """Is each input of these classes? `served`: what `served()` has said; else it is asked.

        As many requests as the server's limits ask for, one at a time. Raises RefusedError,
        OSError, and ValueError for inputs of the wrong kind, before anything is sent.
        """
        served = self.served() if served is None else served
        self._check(inputs, served)
        fields = question(as_text(classes), recall, threshold)
        parts = [
            self._asking.ask(Answer, "POST", "/v1/query", **request)
            for request in requests(fields, inputs, served.limits)
        ]
        return joined(parts)

    def stream(
        self,
        classes: Sequence[str | int],
        inputs: Iterable[Input | Item],
        *,
        recall: float | None = None,
        threshold: float | None = None,
        all: bool = False,
    ) -> Generator[Streamed, None, None]:
        """Is each input of these classes? Answered in their order while more are sent.

        Gives a `Hit` for each input with a match, or for `all` of them, a `LineError` for each that
        is refused, and `Done` at the end. Their `id` is that of the `Item` or, without one, the
        input's place, from 0; a line that is too long has none.

        `inputs` are taken one by one by another thread, once the server has accepted the stream,
        and while the answers are read: do not leave those alone for a minute. Raises RefusedError;
        OSError where there is no answer; ConnectionError where it breaks off; and what `inputs`
        raises. A stream that has begun is not sent again.
        """
        parameters = question(as_text(classes), recall, threshold) | ({"all": True} if all else {})
        return self._asking.converse(
            STREAMED,
            "POST",
            "/v1/query:stream",
            params=parameters,
            content=lines_of(inputs),
            headers={"Content-Type": NDJSON},
        )

    def galleries(self) -> list[GalleryFound]:
        """The collections that can be searched. Raises RefusedError and OSError."""
        return self._asking.ask(GalleriesFound, "GET", "/v1/galleries").galleries

    def search(
        self,
        gallery: str,
        name: str | int,
        *,
        recall: float | None = None,
        threshold: float | None = None,
        page: int = 100,
    ) -> Generator[GalleryHit, None, None]:
        """All items of the class, or those that match, from the highest score on; fetched by pages
        of so many hits as they are read.

        Raises RefusedError, and OSError also where the gallery changes meanwhile.
        """

        def found(offset: int) -> ClassHits:
            return self.search_page(
                gallery, [name], recall=recall, threshold=threshold, limit=page, offset=offset
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
        classes: Sequence[str | int],
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
        path = f"/v1/galleries/{quote(gallery, safe='')}/search"
        return self._asking.ask(Hits, "POST", path, json=body)

    def _check(self, inputs: Sequence[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there is nothing to ask about: give pictures or texts")
        for place, one in enumerate(inputs):
            if isinstance(one, str) != (served.reads == "texts"):
                remedy = "name picture files" if served.reads == "pictures" else "give texts"
                raise ValueError(f"{self.url} reads {served.reads}: {remedy}")
            if isinstance(one, str) and len(one) > served.limits.max_text_chars:
                raise ValueError(
                    f"texts[{place}] ({one[:60].strip()}…) has {len(one)} characters, and "
                    f"{self.url} takes {served.limits.max_text_chars}: shorten it"
                )

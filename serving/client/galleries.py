"""The part of the client that searches galleries."""

from collections.abc import Generator, Iterable
from typing import SupportsIndex

from serving.client.messages import path_of, query_fields
from serving.client.transport import Transport
from serving.schemas import ClassHits, GalleryFound, GalleryHit, GalleryList, Hits


class GalleryQueries:
    """Searches the galleries of a server."""

    _transport: Transport

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
        body = query_fields(classes, recall, threshold) | {"limit": limit, "offset": offset}
        body |= {} if exact is None else {"exact": exact}
        return self._transport.request(
            Hits, "POST", path_of("galleries", gallery, "search"), json=body
        )

"""Recall and time of searches through the approximate index of a gallery, compared with exact ones:

    python -m benchmarks.gallery_recall BUNDLE GALLERY

`kway index` measures the recall with the queries that also set the number of lists. This command
measures it with up to 1,000 classes of the bundle, chosen at random.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import CONSOLE, Row, machine, print_rows, ratio_row
from serving.answer import Query
from serving.galleries.index import MAX_HITS
from serving.galleries.searching import Galleries, Page
from serving.schemas import GalleryHit
from trainer.bundle.bundle import Bundle

_NAME = "gallery"
_APPROXIMATE, _EXACT = Page(0, MAX_HITS, exact=False), Page(0, MAX_HITS, exact=True)

Search = Callable[[Page], Sequence[GalleryHit]]


def measure(bundle: Path, path: Path, num_queries: int) -> Iterator[Row]:
    """Yield rows for the classes of the bundle. Raises SystemExit if the gallery has no index."""
    with Bundle.open(bundle) as opened:
        galleries = Galleries({_NAME: path}, opened)
        info = galleries[_NAME].info
        if info.index is None:
            raise SystemExit(f"{path} has no index: create it with kway index --index")
        of_gallery = f"of {info.num_items:,} x {info.dim}"
        classes = _chosen(opened.spec.num_classes, num_queries)
        searches = [_by_class(galleries, class_id) for class_id in classes]
        yield from _rows(f"{len(classes):,} classes, {of_gallery}", searches, [*info.index.recall])


def _chosen(size: int, most: int) -> list[int]:
    chosen = np.random.default_rng(0).choice(size, min(size, most), replace=False)
    return [int(one) for one in chosen]


def _by_class(galleries: Galleries, class_id: int) -> Search:
    return lambda page: galleries.search(_NAME, Query((class_id,)), page).results[0].hits


def _rows(case: str, searches: Sequence[Search], depths: Sequence[int]) -> Iterator[Row]:
    searches[0](_APPROXIMATE), searches[0](_EXACT)  # read the files into the page cache
    found = [(_timed(search, _APPROXIMATE), _timed(search, _EXACT)) for search in searches]
    for depth in depths:
        shares = [_share(ours[0][:depth], exact[0][:depth]) for ours, exact in found]
        tenth = np.quantile(shares, 0.1)
        details = f"{tenth:.3f} or less for a tenth of the queries"
        yield Row(f"recall at {depth}", case, f"{np.mean(shares):.3f}", details=details)
    ours, theirs = (np.array([pair[kind][1] for pair in found]) for kind in (0, 1))
    yield ratio_row("search through the index / exact", case, ours, theirs)


def _timed(search: Search, page: Page) -> tuple[list[str], float]:
    """Return the ids of the hits and the seconds that the search took."""
    started = time.perf_counter()
    hits = search(page)
    return [hit.id for hit in hits], time.perf_counter() - started


def _share(found: Sequence[str], exact: Sequence[str]) -> float:
    return len({*found} & {*exact}) / len(exact)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].rstrip(":"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("gallery", type=Path)
    parser.add_argument("--queries", type=int, default=1000, help="classes to search for")
    options = parser.parse_args(arguments)
    CONSOLE.print(machine())
    print_rows([*measure(options.bundle, options.gallery, options.queries)])


if __name__ == "__main__":
    main()

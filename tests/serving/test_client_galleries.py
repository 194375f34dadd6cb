"""The client with the real application on a free port: gallery searches, and ids of classes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client import Client, RejectedError
from serving.galleries.building import index_collection
from serving.galleries.collection import open_collection
from serving.model import Model
from serving.schemas import Hits
from tests.serving import in_process
from tests.serving.in_process import application
from tests.serving.page_driver import image
from tests.tiny_bundle import NAMES, write, write_of_texts

NUM = 57


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("galleries")
    bundle = write_of_texts(folder / "texts")
    (folder / "lines").write_text("".join(f"a cat {'a dog ' * (i % 9)}{i}\n" for i in range(NUM)))
    collection = open_collection(folder / "lines", "texts")
    index_collection(Model.open(bundle), collection, folder / "gallery")
    with in_process.listening(
        application(bundle, galleries={"one.two": folder / "gallery"})
    ) as url:
        yield url


def test_a_search_yields_all_items_in_descending_order_of_score_and_fetches_pages_as_needed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, fetch = [], Client.search_page

    def spy(*arguments: Any, **options: Any) -> Hits:
        offsets.append(options.get("offset", 0))
        return fetch(*arguments, **options)

    monkeypatch.setattr(Client, "search_page", spy)
    with Client(url) as client:
        hits = client.search("one.two", "husky", page_size=10)
        assert offsets == []
        found = list(islice(hits, 10))
        assert offsets == [0]
        found.append(next(hits))
        assert offsets == [0, 10]
        found.extend(hits)
        assert found == client.search_page("one.two", ["husky"], limit=1000).results[0].hits
        (gallery,) = client.galleries()
    assert (gallery.name, gallery.num_items, gallery.reads) == ("one.two", NUM, "texts")
    assert sorted(hit.item for hit in found) == list(range(NUM))
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)


def test_a_search_with_a_threshold_yields_only_matches(url: str) -> None:
    with Client(url) as client:
        hits = list(client.search("one.two", "husky"))
        threshold = hits[NUM // 3].score
        matching = [hit.item for hit in hits if hit.score >= threshold]
        found = list(client.search("one.two", "husky", threshold=threshold, page_size=7))
        none = client.search_page("one.two", ["husky"], threshold=1e6).results[0]
        at_recall = client.search_page("one.two", [1], recall=0.9, limit=1).results[0]
        assert list(client.search("one.two", "husky", threshold=1e6)) == []
    assert [hit.item for hit in found] == matching
    assert (none.hits, none.matches, none.threshold) == ([], 0, 1e6)
    assert none.threshold_source == "request"
    assert (at_recall.threshold, at_recall.threshold_source) == (1.0, "guaranteed")


def test_a_number_is_a_class_id_even_if_a_class_has_that_name(url: str) -> None:
    with Client(url) as client:
        assert next(client.search("one.two", 3)).class_name == NAMES[3]
        with pytest.raises(RejectedError, match="is both the name of class"):
            next(client.search("one.two", "#3"))
        assert next(client.search("one.two", np.int64(3))).class_name == NAMES[3]


@pytest.mark.parametrize(
    ("gallery", "name", "code"),
    [
        ("none", "husky", "unknown_gallery"),
        ("a/b ?#", "husky", "no_such_path"),
        ("one.two", "huskey", "unknown_class"),
    ],
)
def test_unknown_galleries_and_classes_are_rejected(
    url: str, gallery: str, name: str, code: str
) -> None:
    with Client(url) as client, pytest.raises(RejectedError) as rejected:
        next(client.search(gallery, name))
    assert (rejected.value.status, rejected.value.code) == (404, code)


# ---------------------------------------------------------------------------- TLS


def test_an_id_in_a_query_of_images_is_never_a_name(tmp_path: Path) -> None:
    """A class of this bundle has the name "#3"."""
    named = NAMES.index("#3")
    with in_process.listening(application(write(tmp_path / "pets"))) as url, Client(url) as client:
        by_id = client.query([3, named], [image(0)]).results[0].verdicts
        assert [one.class_id for one in by_id] == [3, named]
        with pytest.raises(RejectedError, match="is both the name"):
            client.query(["#3"], [image(0)])

"""The client's search of galleries, against the real application on a real port."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from serving.client import Client, RefusedError
from serving.galleries.building import IndexOptions, index_collection
from serving.galleries.collection import open_collection
from serving.model import Model
from tests.serving import in_process
from tests.serving.in_process import application
from tests.serving.relay import Relay, relayed
from tests.tiny_bundle import NAMES, write_of_texts

NUM = 57


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("galleries")
    bundle = write_of_texts(folder / "texts")
    (folder / "lines").write_text("".join(f"a cat {'a dog ' * (i % 9)}{i}\n" for i in range(NUM)))
    collection = open_collection(folder / "lines", "texts")
    index_collection(Model.open(bundle), collection, folder / "made", IndexOptions(batch_size=8))
    with in_process.listening(application(bundle, galleries={"one.two": folder / "made"})) as url:
        yield url


@pytest.fixture
def relay(url: str) -> Iterator[Relay]:
    with relayed(url) as relay:
        yield relay


def test_a_search_pages_through_everything_from_the_highest_score_on(relay: Relay) -> None:
    with Client(relay.url) as client:
        (gallery,) = client.galleries()
        assert (gallery.name, gallery.num_items, gallery.reads) == ("one.two", NUM, "texts")
        hits = list(client.search("one.two", "husky", page_size=10))
        whole = client.search_page("one.two", ["husky"], limit=1000).results[0]
    assert hits == whole.hits
    assert sorted(hit.item for hit in hits) == list(range(NUM))
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_only_the_pages_that_are_read_are_fetched(relay: Relay) -> None:
    with Client(relay.url) as client:
        hits = client.search("one.two", "husky", page_size=10)
        assert relay.connections == 0
        assert len(list(islice(hits, 10))) == 10
        after_one = relay.sent
        next(hits)
        assert relay.sent > after_one


def test_with_a_threshold_only_matches_are_found_and_the_page_has_the_bar(url: str) -> None:
    with Client(url) as client:
        every = list(client.search("one.two", "husky"))
        bar = every[NUM // 3].score
        matching = [hit.item for hit in every if hit.score >= bar]
        found = list(client.search("one.two", "husky", threshold=bar, page_size=7))
        none = client.search_page("one.two", ["husky"], threshold=1e6).results[0]
        recalled = client.search_page("one.two", [1], recall=0.9, limit=1).results[0]
        assert list(client.search("one.two", "husky", threshold=1e6)) == []
    assert [hit.item for hit in found] == matching
    assert (none.hits, none.matches, none.threshold) == ([], 0, 1e6)
    assert none.threshold_source == "request"
    assert (recalled.threshold, recalled.threshold_source) == (1.0, "class")


def test_a_number_is_a_class_id_also_where_a_class_is_named_so(url: str) -> None:
    with Client(url) as client:
        assert next(client.search("one.two", 3)).class_name == NAMES[3]
        with pytest.raises(RefusedError, match="is the name of class"):
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
def test_what_is_not_there_is_refused(url: str, gallery: str, name: str, code: str) -> None:
    with Client(url) as client, pytest.raises(RefusedError) as refused:
        next(client.search(gallery, name))
    assert (refused.value.status, refused.value.code) == (404, code)


def test_the_limits_say_how_large_a_frame_may_be(url: str) -> None:
    with Client(url) as client:
        assert client.served().limits.max_frame_bytes == 4 * 2**20
        assert client.served().logits.kind == "dot"

"""Items are inserted into a served gallery, deleted and used as examples without a restart.

The real routes and service run in this process. Two applications that share a board are two
replicas of a server.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.client import Client, RejectedError
from serving.config import ServingConfig
from serving.galleries.changes import ChangeLog, GalleryUpdate
from serving.galleries.gallery import Gallery
from serving.watches.board import Board
from serving.watches.storage import MemoryStorage
from serving.watches.watch import WatchesDownError
from tests.serving import in_process
from tests.serving.in_process import application, refusal
from tests.serving.test_galleries import command, fill, image
from tests.tiny_bundle import write, write_of_texts
from trainer.bundle.bundle import Bundle

NUM = 28
PATH = "/v1/galleries/pets"
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundles") / "pets")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def gallery(bundle: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("galleries") / "pets"
    command(bundle, folder, "-o", path)
    return path


def replicas(
    bundle: Path, gallery: Path, count: int = 1, storage: object = None, **limits: object
) -> list[Ask]:
    """Return functions that send requests to applications with a common board."""
    board = Board(ServingConfig.model_validate(limits), storage=storage)  # type: ignore[arg-type]
    galleries = {"pets": gallery}
    return [
        partial(in_process.ask, application(bundle, board=board, galleries=galleries, **limits))
        for _ in range(count)
    ]


@pytest.fixture
def ask(bundle: Path, gallery: Path) -> Ask:
    return replicas(bundle, gallery)[0]


def search(ask: Ask, **body: object) -> dict:
    response = ask("POST", f"{PATH}/search", json={"limit": 1000, **body})
    assert response.status_code == 200, response.text
    return response.json()


def hits(ask: Ask, name: str = "husky") -> list[dict]:
    return search(ask, classes=[name])["results"][0]["hits"]


def insert(ask: Ask, *files: bytes, **fields: object) -> list[str]:
    images = [base64.b64encode(file).decode() for file in files]
    response = ask("POST", f"{PATH}/items", json={"images": images, **fields})
    assert response.status_code == 201, response.text
    return [item["id"] for item in response.json()["items"]]


def delete(ask: Ask, item_id: str) -> None:
    response = ask("DELETE", f"{PATH}/items/{item_id}")
    assert response.status_code == 204, response.text


# ---------------------------------------------------------------------------- changes


def test_an_inserted_image_is_found_with_the_score_of_a_query_and_has_a_thumbnail(
    ask: Ask,
) -> None:
    raw = image(500, 300, 200)
    new, other = insert(ask, raw, image(501), names=["new/one.png", "new/two.png"])
    found = {hit["id"]: hit for hit in hits(ask)}
    assert len(found) == NUM + 2
    hit = found[new]
    assert (hit["item"], hit["name"], hit["text"]) == (None, "new/one.png", None)
    body = {"classes": ["husky"], "images": [base64.b64encode(raw).decode()]}
    verdict = ask("POST", "/v1/query", json=body).json()["results"][0]["verdicts"][0]
    assert hit["score"] == pytest.approx(verdict["score"], rel=1e-5, abs=1e-5)
    response = ask("GET", f"{PATH}/items/{new}/thumbnail")
    assert response.headers["content-type"] == "image/jpeg"
    assert response.content != ask("GET", f"{PATH}/items/{other}/thumbnail").content
    (described,) = ask("GET", "/v1/galleries").json()["galleries"]
    assert (described["num_items"], described["inserted"]) == (NUM + 2, 2)


def test_a_deleted_item_is_not_returned_by_any_page_threshold_or_thumbnail(ask: Ask) -> None:
    before = hits(ask)
    (new,) = insert(ask, image(500))
    gone = [before[0]["id"], before[9]["id"], new]
    for item_id in gone:
        delete(ask, item_id)
    expected = [hit for hit in before if hit["id"] not in gone]
    assert hits(ask) == expected
    pages = [
        hit
        for offset in range(0, NUM, 5)
        for hit in search(ask, classes=["husky"], limit=5, offset=offset)["results"][0]["hits"]
    ]
    assert pages == expected
    (some,) = search(ask, classes=["husky"], threshold=before[12]["score"])["results"]
    num_matches = sum(hit["score"] >= before[12]["score"] for hit in expected)
    assert (some["matches"], len(some["hits"])) == (num_matches, num_matches)
    for item in (*gone, str(before[0]["item"])):
        response = ask("GET", f"{PATH}/items/{item}/thumbnail")
        assert refusal(response) == (404, "unknown_item")
    for item_id in gone:
        assert refusal(ask("DELETE", f"{PATH}/items/{item_id}")) == (404, "unknown_item")
    (described,) = ask("GET", "/v1/galleries").json()["galleries"]
    assert (described["num_items"], described["inserted"], described["deleted"]) == (NUM - 2, 0, 2)


def test_a_gallery_whose_items_are_all_deleted_has_no_hits(ask: Ask) -> None:
    for hit in hits(ask):
        delete(ask, hit["id"])
    (result,) = search(ask, classes=["husky"])["results"]
    assert (result["total"], result["hits"]) == (0, [])
    (new,) = insert(ask, image(3))
    assert [hit["id"] for hit in hits(ask)] == [new]


def test_each_replica_sees_a_change_as_soon_as_it_was_answered(bundle: Path, gallery: Path) -> None:
    one, two = replicas(bundle, gallery, 2)
    assert len(hits(two)) == NUM
    (new,) = insert(one, image(500))
    assert new in [hit["id"] for hit in hits(two)]
    assert two("GET", f"{PATH}/items/{new}/thumbnail").status_code == 200
    delete(two, new)
    delete(two, hits(one)[0]["id"])
    assert hits(one) == hits(two)
    assert len(hits(one)) == NUM - 1


def test_a_replica_that_missed_many_changes_gets_all_of_them(
    bundle: Path, gallery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.galleries.changes._REMEMBERED", 5)
    one, two = replicas(bundle, gallery, 2)
    assert len(hits(two)) == NUM
    kept = insert(one, image(500), image(501))
    for _ in range(3):  # more changes than the board remembers
        delete(one, insert(one, image(502))[0])
    delete(one, kept[0])
    assert {hit["id"] for hit in hits(two) if hit["item"] is None} == {kept[1]}
    assert hits(one) == hits(two)


class _Failing(MemoryStorage):
    is_down = False

    def apply(self, changes: object) -> None:
        if self.is_down:
            raise WatchesDownError("the disk is full")
        super().apply(changes)  # type: ignore[arg-type]


def test_a_change_that_cannot_be_stored_is_rejected_and_not_visible(
    bundle: Path, gallery: Path
) -> None:
    storage = _Failing()
    (ask,) = replicas(bundle, gallery, storage=storage)
    before = hits(ask)
    storage.is_down = True
    response = ask("POST", f"{PATH}/items", json={"images": [base64.b64encode(image(1)).decode()]})
    assert refusal(response) == (503, "watches_down")
    assert refusal(ask("DELETE", f"{PATH}/items/{before[0]['id']}")) == (503, "watches_down")
    assert hits(ask) == before


class _Unreachable(ChangeLog):
    is_down = False

    async def gallery_changes(self, gallery: str, epoch: str, version: int) -> GalleryUpdate:
        if self.is_down:
            raise WatchesDownError("the service is not responding")
        return await super().gallery_changes(gallery, epoch, version)


def test_the_last_known_version_is_searched_while_the_changes_cannot_be_read(
    bundle: Path, gallery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.galleries.live._RETRY_SECONDS", 0.0)
    board = Board(ServingConfig())
    changes = board.galleries = _Unreachable(ServingConfig(), MemoryStorage())
    changes.is_down = True
    one, two = (
        partial(in_process.ask, application(bundle, board=board, galleries={"pets": gallery}))
        for _ in range(2)
    )
    body = {"classes": [0]}
    assert refusal(one("POST", f"{PATH}/search", json=body)) == (503, "watches_down")
    changes.is_down = False
    (new,) = insert(one, image(500))
    found = hits(one)
    assert new in [hit["id"] for hit in found]
    changes.is_down = True
    assert hits(one) == found
    assert refusal(one("DELETE", f"{PATH}/items/{new}")) == (503, "watches_down")
    assert refusal(two("POST", f"{PATH}/search", json=body)) == (503, "watches_down")
    changes.is_down = False
    assert hits(two) == found


# ---------------------------------------------------------------------------- durability

_SERVER = """
import sys, time
from pathlib import Path
from serving.config import ServingConfig
from serving.watches.board import Board
from serving.watches.state_file import StateFile
from tests.serving.in_process import application, listening

bundle, gallery, state = map(Path, sys.argv[1:])
board = Board(ServingConfig(), storage=StateFile(state))
with listening(application(bundle, board=board, galleries={"pets": gallery})) as url:
    print(url, flush=True)
    time.sleep(600)
"""


@contextmanager
def started(bundle: Path, gallery: Path, state: Path) -> Iterator[Client]:
    """Start a server in another process, and kill it at the end."""
    arguments = [str(bundle), str(gallery), str(state)]
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            assert process.stdout is not None
            with Client(process.stdout.readline().strip()) as client:
                yield client
        finally:
            process.kill()


def test_answered_changes_survive_kills(bundle: Path, gallery: Path, tmp_path: Path) -> None:
    present, deleted = set[str](), set[str]()
    for number in range(2):
        with started(bundle, gallery, tmp_path) as client:
            found = {hit.id for hit in client.search("pets", "husky")}
            assert present <= found
            assert not deleted & found
            assert len(found) == NUM + 2 * number
            images = [image(10 * number + i) for i in range(3)]
            present |= {item.id for item in client.insert_items("pets", images)}
            gone = next(hit.id for hit in client.search("pets", "husky") if hit.item is not None)
            client.delete_item("pets", gone)
            deleted.add(gone)


# ---------------------------------------------------------------------------- building again


def test_changes_remain_if_the_gallery_is_built_again(bundle: Path, tmp_path: Path) -> None:
    folder, path, storage = fill(tmp_path / "in", 9), tmp_path / "out", MemoryStorage()
    command(bundle, folder, "-o", path)
    (ask,) = replicas(bundle, path, storage=storage)
    by_name = {hit["name"]: hit["id"] for hit in hits(ask)}
    insert(ask, image(600), image(601), names=["cats/new.png", "only/inserted.png"])
    for name in ("0.png", "3.png", "cats/1.png"):
        delete(ask, by_name[name])
    insert(ask, image(602), names=["3.png"])  # replaces the deleted item

    (folder / "cats" / "new.png").write_bytes(image(600))
    (folder / "3.png").write_bytes(image(602, 21))
    (folder / "00.png").write_bytes(image(603))  # changes the indices of other items
    command(bundle, folder, "-o", path)
    (ask,) = replicas(bundle, path, storage=storage)
    found = hits(ask)
    names = [hit["name"] for hit in found]
    assert len(set(names)) == len(names)
    assert {"cats/new.png", "only/inserted.png", "3.png", "00.png"} <= set(names)
    assert not {"0.png", "cats/1.png"} & set(names)
    assert [hit["name"] for hit in found if hit["item"] is None] == ["only/inserted.png"]
    assert len([key for key, _ in storage.items() if "/inserted/" in key]) == 1
    stale = by_name["cats/deep/2.png"]
    assert stale not in [hit["id"] for hit in found]
    assert refusal(ask("DELETE", f"{PATH}/items/{stale}")) == (404, "unknown_item")


def test_items_are_found_by_name(bundle: Path, gallery: Path) -> None:
    opened = Gallery(gallery, Bundle.open(bundle))
    for index in range(opened.num_items):
        assert opened.find(opened.item(index).name) == index
        assert opened.index_of_id(opened.id_of(index)) == index
    for name in ("", "a", "zzz", "cats", "cats/1", "cats/deep/", "猫"):
        assert opened.find(name) is None


# ---------------------------------------------------------------------------- examples


def test_items_similar_to_an_example_are_ordered_by_cosine(ask: Ask, gallery: Path) -> None:
    features = load_file(gallery / "features.safetensors")["matrix"]
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    ids = {hit["item"]: hit["id"] for hit in hits(ask)}
    body = {"examples": [ids[4], ids[20]], "limit": 1000}
    found = ask("POST", f"{PATH}/search", json=body).json()
    assert found["results"] == []
    for position, result in zip((4, 20), found["examples"], strict=True):
        assert result["example"] == ids[position]
        cosines = units @ units[position]
        by_item = {hit["item"]: hit["score"] for hit in result["hits"]}
        np.testing.assert_allclose([by_item[i] for i in range(NUM)], cosines, atol=1e-5)
        scores = [hit["score"] for hit in result["hits"]]
        assert scores == sorted(scores, reverse=True)
    threshold = found["examples"][0]["hits"][5]["score"]
    body = {"examples": [ids[4]], "limit": 3, "offset": 2, "threshold": threshold}
    (some,) = ask("POST", f"{PATH}/search", json=body).json()["examples"]
    assert some["hits"] == [{**hit, "match": True} for hit in found["examples"][0]["hits"][2:5]]
    assert some["matches"] >= 6


def test_an_inserted_item_can_be_an_example(ask: Ask) -> None:
    (new,) = insert(ask, image(4))
    (result,) = search(ask, examples=[new], limit=1)["examples"]
    assert result["hits"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    delete(ask, new)
    response = ask("POST", f"{PATH}/search", json={"examples": [new]})
    assert refusal(response) == (404, "unknown_item")


# ---------------------------------------------------------------------------- limits and errors


def test_the_numbers_of_inserted_and_deleted_items_are_limited(bundle: Path, gallery: Path) -> None:
    limits = {"max_gallery_inserts": 3, "max_gallery_deletions": 1}
    one, two = replicas(bundle, gallery, 2, **limits)
    (first, _) = insert(one, image(1), image(2))
    images = [base64.b64encode(image(seed)).decode() for seed in (3, 4)]
    response = two("POST", f"{PATH}/items", json={"images": images})
    assert refusal(response) == (409, "gallery_full")
    assert len(hits(one)) == NUM + 2  # none of them
    delete(two, first)
    insert(two, image(3), image(4))
    ids = [hit["id"] for hit in hits(one) if hit["item"] is not None]
    delete(one, ids[0])
    assert refusal(two("DELETE", f"{PATH}/items/{ids[1]}")) == (409, "gallery_full")


def test_names_are_unique(ask: Ask) -> None:
    insert(ask, image(1), names=["a"])
    for names in (["a", "b"], ["b", "b"], ["b", "cats/1.png"]):
        images = [base64.b64encode(image(seed)).decode() for seed in (3, 4)]
        response = ask("POST", f"{PATH}/items", json={"images": images, "names": names})
        assert refusal(response) == (409, "name_in_use"), names
    assert len(hits(ask)) == NUM + 1


IMAGE = base64.b64encode(image(1)).decode()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "pets/items", b"", 400, "empty_body"),
        ("POST", "pets/items", {}, 400, "no_input"),
        ("POST", "pets/items", {"images": ["AAAA"]}, 400, "not_a_picture"),
        ("POST", "pets/items", {"images": [IMAGE] * 5}, 413, "too_many_pictures"),
        ("POST", "pets/items", {"texts": ["a"]}, 422, "not_a_text_model"),
        ("POST", "pets/items", {"images": [IMAGE], "names": []}, 422, "invalid_query"),
        ("POST", "pets/items", {"images": [IMAGE], "names": [""]}, 422, "invalid_query"),
        ("POST", "pets/items", {"images": [IMAGE], "names": ["a" * 1001]}, 422, "invalid_query"),
        ("POST", "pets/items", {"images": ["http://host/a.png"]}, 422, "urls_refused"),
        ("POST", "cats/items", {"images": [IMAGE]}, 404, "unknown_gallery"),
        ("DELETE", "pets/items/0", None, 422, "invalid_parameter"),
        ("DELETE", "pets/items/0.00000000", None, 404, "unknown_item"),
        ("DELETE", "pets/items/999.00000000", None, 404, "unknown_item"),
        ("DELETE", "pets/items/new.0123456789abcdef", None, 404, "unknown_item"),
        ("DELETE", "cats/items/0.00000000", None, 404, "unknown_gallery"),
        ("POST", "pets/search", {"limit": 1}, 422, "invalid_query"),
        ("POST", "pets/search", {"classes": [0], "examples": ["a"]}, 422, "invalid_query"),
        ("POST", "pets/search", {"examples": []}, 422, "invalid_query"),
        ("POST", "pets/search", {"examples": ["a"], "recall": 0.9}, 422, "invalid_query"),
        ("POST", "pets/search", {"examples": ["0"]}, 404, "unknown_item"),
        ("POST", "pets/search", {"examples": ["a"] * 101}, 413, "too_many_classes"),
        ("POST", "pets/search", {"examples": ["a"] * 11, "limit": 1000}, 422, "invalid_query"),
    ],
)
def test_invalid_changes_and_examples_are_rejected_with_an_error_code(
    limited: Ask, method: str, path: str, body: object, status: int, code: str
) -> None:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    headers = {} if body is None else {"content-type": "application/json"}
    response = limited(method, f"/v1/galleries/{path}", content=content, headers=headers)
    assert refusal(response) == (status, code), response.text


@pytest.fixture(scope="module")
def limited(bundle: Path, gallery: Path) -> Ask:
    return replicas(bundle, gallery, max_inputs=4)[0]


def test_a_form_of_another_site_cannot_insert_items(limited: Ask) -> None:
    response = limited("POST", f"{PATH}/items", files=[("images", ("a.png", image(1)))])
    assert refusal(response) == (415, "unknown_content_type")


def test_changes_require_a_token(bundle: Path, gallery: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("a" * 24 + "\n")
    (ask,) = replicas(bundle, gallery, token_file=tokens)
    for method, path in (("POST", f"{PATH}/items"), ("DELETE", f"{PATH}/items/0.00000000")):
        assert refusal(ask(method, path)) == (401, "no_token")


# ---------------------------------------------------------------------------- client, texts


def test_the_client_changes_a_gallery_of_texts(tmp_path: Path) -> None:
    bundle = write_of_texts(tmp_path / "texts")
    (tmp_path / "lines").write_text("a cat\na dog\nund hund\n")
    command(bundle, tmp_path / "lines", "-o", tmp_path / "out")
    api = application(bundle, galleries={"texts": tmp_path / "out"})
    with in_process.listening(api) as url, Client(url) as client:
        one, two = client.insert_items("texts", ["a cat", "x" * 600], names=["4", "5"])
        assert (one.name, one.text, two.text) == ("4", "a cat", "x" * 499 + "…")
        by_name = {hit.name: hit for hit in client.search("texts", "husky")}
        assert by_name["4"].score == pytest.approx(by_name["1"].score, rel=1e-4, abs=1e-5)
        (similar,) = client.search_similar("texts", [one.id], limit=2)
        assert {hit.name for hit in similar.hits} == {"1", "4"}
        client.delete_item("texts", one.id)
        client.delete_item("texts", by_name["1"].id)
        assert {hit.name for hit in client.search("texts", "husky")} == {"2", "3", "5"}
        with pytest.raises(RejectedError, match="does not contain an item") as rejected:
            client.delete_item("texts", one.id)
        assert rejected.value.code == "unknown_item"
        with pytest.raises(RejectedError) as rejected:
            client.insert_items("texts", ["a"], names=["5"])
        assert (rejected.value.status, rejected.value.code) == (409, "name_in_use")
        with pytest.raises(ValueError, match="at least one image or text"):
            client.insert_items("texts", [])
        with pytest.raises(ValueError, match="is not a valid name or id"):
            client.delete_item("texts", "..")

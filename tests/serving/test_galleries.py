"""Galleries are built by `kway index` and searched over HTTP, and give the same scores as queries.

The real routes and service run in this process, without a server and without Ray.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from serving.galleries.building import index_collection
from serving.galleries.collection import open_collection
from serving.galleries.gallery import Gallery, features_identity
from serving.galleries.searching import best
from serving.model import Model
from tests.noise_images import image
from tests.serving import in_process
from tests.serving.in_process import application, refusal
from tests.serving.started import index_gallery
from tests.tiny_bundle import WAYS_TO_ASK, write, write_of_texts
from trainer.bundle.bundle import Bundle

NUM = 23
UNUSUAL_NAMES = (
    "new\nline.png",
    "tab\t'quote\".png",
    "猫 🐶.png",
    "[markup].png",
    os.fsdecode(b"\xff.png"),
)


def fill(folder: Path, num: int = NUM) -> Path:
    """Write images at three folder depths. Some have unusual names, and some are duplicates that
    cause ties.
    """
    for index in range(num):
        subfolder = folder / ("", "cats", "cats/deep")[index % 3]
        subfolder.mkdir(parents=True, exist_ok=True)
        (subfolder / f"{index}.png").write_bytes(image(index % (num - 5)))
    for index, name in enumerate(UNUSUAL_NAMES):
        (folder / name).write_bytes(image(100 + index))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def gallery(bundle: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("galleries") / "pets"
    index_gallery(bundle, folder, "-o", path, "--batch-size", "4")
    return path


def summary(output: str) -> int:
    """Return the number of items from the last line."""
    return int(output.splitlines()[-1].rpartition(": ")[2].split()[0])


def names(path: Path) -> list[str]:
    return [json.loads(line)[0] for line in (path / "items.jsonl").read_bytes().splitlines()]


def unreadable(path: Path) -> dict[str, str]:
    lines = map(json.loads, (path / "unreadable.jsonl").read_text().splitlines())
    return {line["name"]: line["reason"] for line in lines}


Ask = Callable[..., httpx.Response]


def requester(bundle: Path, **galleries: Path) -> Ask:
    """Return a function that sends requests to an application serving `bundle`."""
    return partial(in_process.ask, application(bundle, galleries=galleries))


@pytest.fixture(scope="module")
def ask(bundle: Path, gallery: Path) -> Ask:
    return requester(bundle, pets=gallery)


def search(ask: Ask, **body: object) -> dict:
    response = ask("POST", "/v1/galleries/pets/search", json=body)
    assert response.status_code == 200, response.text
    return response.json()


# ---------------------------------------------------------------------------- indexing


def test_a_gallery_contains_every_readable_image_folder_by_folder(
    gallery: Path, folder: Path
) -> None:
    paths = [path.relative_to(folder) for path in folder.rglob("*.png")]
    order = sorted(paths, key=lambda path: (path.parent.parts, path.name))
    assert names(gallery) == [str(path) for path in order]
    assert len(names(gallery)) == NUM + len(UNUSUAL_NAMES)


def test_a_gallery_that_is_indexed_again_is_replaced(bundle: Path, tmp_path: Path) -> None:
    """A symbolic link to a gallery stays, and its target is replaced."""
    folder, path = fill(tmp_path / "in", 9), tmp_path / "out"
    index_gallery(bundle, folder, "-o", path)
    (tmp_path / "link").symlink_to("out")
    (folder / "0.png").unlink()
    assert summary(index_gallery(bundle, folder, "-o", tmp_path / "link")) == 13
    assert (tmp_path / "link").is_symlink()
    assert len(names(path)) == 13
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "link", "out"]
    Gallery(path, Bundle.open(bundle)).verify()


def test_unreadable_items_are_counted_and_listed(bundle: Path, tmp_path: Path) -> None:
    folder, path = fill(tmp_path / "in", 6), tmp_path / "out"
    (tmp_path / "secret.png").write_bytes(image(1))
    (folder / "cut.png").write_bytes(image(0)[:60])
    (folder / "text.jpg").write_bytes(b"not an image")
    (folder / "notes.txt").write_bytes(b"")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "1.png").write_bytes(image(1))
    os.mkfifo(folder / "pipe.png")
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "in.png").symlink_to(folder / "0.png")
    (folder / "nowhere.png").symlink_to(folder / "absent.png")
    (folder / "around").symlink_to(folder)
    output = index_gallery(bundle, folder, "-o", path)
    assert summary(output) == len(names(path)) == 12
    assert "in.png" in names(path)
    reasons = unreadable(path)
    assert set(reasons) == {"cut.png", "text.jpg", "pipe.png", "out.png", "nowhere.png"}
    assert reasons["out.png"] == "link to a file outside the folder"
    assert reasons["pipe.png"] == "not a regular file"
    assert "skipped: text.jpg: " in output
    assert "warning: skipped 5 unreadable images, listed in" in output
    assert "note: ignored 1 file without" in output


class _Overflowing(Model):
    """Returns infinite features for the first input of each batch."""

    def features(self, prepared: Sequence[Any]) -> Tensor:
        return super().features(prepared).index_fill(0, torch.tensor(0), float("inf"))


def test_items_with_infinite_features_are_omitted(bundle: Path, tmp_path: Path) -> None:
    images = open_collection(fill(tmp_path / "in", 6), "images")
    info = index_collection(_Overflowing.open(bundle), images, tmp_path / "out", batch_size=4)
    assert (info.num_items, info.unreadable) == (8, 3)
    (reason,) = set(unreadable(tmp_path / "out").values())
    assert "not finite" in reason
    assert np.isfinite(load_file(tmp_path / "out" / "features.safetensors")["matrix"]).all()


def test_invalid_collections_and_output_paths_are_rejected(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty does not contain any images"):
        index_gallery(bundle, tmp_path / "empty", "-o", tmp_path / "out")
    (tmp_path / "empty" / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"to index: a\.png cannot be read \(not an image"):
        index_gallery(bundle, tmp_path / "empty", "-o", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="is not a folder: the model requires images"):
        index_gallery(bundle, tmp_path / "empty" / "a.png", "-o", tmp_path / "out")
    with pytest.raises(ValueError, match="is not a gallery: pass another path"):
        index_gallery(bundle, tmp_path / "empty", "-o", tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_gallery_built_from_another_folder_is_not_overwritten(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    moved = fill(tmp_path / "moved", 6)
    path = tmp_path / "out"
    index_gallery(bundle, moved, "-o", path)
    with pytest.raises(ValueError, match=r"out was created from .*moved, not from .*--force"):
        index_gallery(bundle, folder, "-o", path)
    moved.rename(tmp_path / "again")
    index_gallery(bundle, tmp_path / "again", "-o", path, "--force")
    assert json.loads((path / "gallery.json").read_text())["source"] == str(tmp_path / "again")


# ---------------------------------------------------------------------------- opening


def test_features_from_another_backbone_are_rejected(
    bundle: Path, gallery: Path, tmp_path: Path
) -> None:
    image = json.loads((bundle / "bundle.json").read_text())["model"]["image"]
    changed = write(tmp_path / "size", changes={"image": {**image, "resize": 24}})
    with pytest.raises(ValueError, match="pets was created with a different backbone"):
        Gallery(gallery, Bundle.open(changed))


def test_a_gallery_belongs_to_one_precision_and_to_one_conversion_to_int8(tmp_path: Path) -> None:
    def identity(name: str, precision: str, onnx: bytes | None = None) -> str:
        options = {} if onnx is None else {"write_onnx": lambda file: file.write_bytes(onnx)}
        with Bundle.open(
            write(tmp_path / name, changes={"precision": precision}, **options)
        ) as bundle:
            return features_identity(bundle)

    original, int8 = identity("float32", "float32"), identity("int8", "int8", b"x")
    assert identity("onnx", "float32", b"x") == original
    assert len({original, int8, identity("bf16", "bf16"), identity("y", "int8", b"y")}) == 4
    assert identity("copy", "int8", b"x") == int8


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("features.safetensors", None, b"x", "features.safetensors has .* bytes instead of"),
        ("items.jsonl", b"[", b"X", "items.jsonl does not match its checksum"),
        ("gallery.json", b"{", b"", "gallery.json is damaged"),
        ("gallery.json", b'"dim": 16', b'"dim": 17', "different backbone, precision or"),
        ("gallery.json", b'_items": 28', b'_items": 29', "F32"),
        ("gallery.json", b'"dim"', b'"dims"', "gallery.json is damaged or .*dim: Fie"),
        ("gallery.json", b'ion": 1', b'ion": 3', "format_version: .*update kway"),
        ("gallery.json", b'"items.jsonl"', b'"../x"', "files must list"),
        ("offsets.safetensors", None, None, "offsets.safetensors is missing"),
        ("gallery.json", None, None, "is not a gallery: gallery.json is missing"),
    ],
)
def test_errors_for_a_damaged_gallery_name_the_file(
    gallery: Path,
    bundle: Path,
    tmp_path: Path,
    file: str,
    old: bytes | None,
    new: bytes | None,
    message: str,
) -> None:
    copy = shutil.copytree(gallery, tmp_path / "copy") / file
    data = copy.read_bytes()
    assert old is None or old in data
    if new is None:
        copy.unlink()
    else:
        copy.write_bytes(data + new if old is None else data.replace(old, new, 1))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Gallery(copy.parent, Bundle.open(bundle)).verify()


# ---------------------------------------------------------------------------- searching


def test_a_search_returns_the_same_scores_and_matches_as_queries(
    ask: Ask, gallery: Path, folder: Path
) -> None:
    fields = {"classes": list(WAYS_TO_ASK), "recall": 0.9}
    everything = search(ask, classes=list(WAYS_TO_ASK), limit=1000)
    matching = search(ask, **fields, limit=1000)
    assert everything["num_items"] == NUM + len(UNUSUAL_NAMES)
    shown = {hit["item"]: hit["name"] for hit in everything["results"][0]["hits"]}
    assert [shown[index] for index in range(len(shown))] == [
        name.replace("\udcff", "\\xff") for name in names(gallery)
    ]
    for index, file in enumerate(names(gallery)):
        request = {"data": fields, "files": [("images", ("a", (folder / file).read_bytes()))]}
        verdicts = ask("POST", "/v1/query", **request).json()["results"][0]["verdicts"]
        for verdict, every, some in zip(
            verdicts, everything["results"], matching["results"], strict=True
        ):
            (hit,) = [hit for hit in every["hits"] if hit["item"] == index]
            assert hit["score"] == pytest.approx(verdict["score"], rel=1e-5, abs=1e-5)
            assert hit["match"] is None
            found = [hit for hit in some["hits"] if hit["item"] == index]
            assert [hit["match"] for hit in found] == [True] * verdict["match"]
            for hit in found:
                keys = ("class", "class_id", "threshold", "threshold_source")
                assert [hit[key] for key in keys] == [verdict[key] for key in keys]
    assert 0 < sum(result["matches"] for result in matching["results"]) < 7 * NUM


def test_pages_are_consistent_and_ties_are_in_item_order(ask: Ask) -> None:
    (complete,) = search(ask, classes=["husky"], limit=1000)["results"]
    order = [(-hit["score"], hit["item"]) for hit in complete["hits"]]
    assert order == sorted(order)
    assert len({score for score, _ in order}) == len(order) - 5  # the duplicates
    pages = [
        search(ask, classes=["husky"], limit=4, offset=offset)["results"][0]
        for offset in range(0, len(order) + 4, 4)
    ]
    assert [hit for page in pages for hit in page["hits"]] == complete["hits"]
    assert {page["total"] for page in pages} == {len(order)}
    assert pages[-1]["hits"] == []

    threshold = complete["hits"][9]["score"]
    (some,) = search(ask, classes=["husky"], threshold=threshold, limit=7, offset=5)["results"]
    num_matches = sum(hit["score"] >= threshold for hit in complete["hits"])
    assert (some["matches"], some["total"]) == (num_matches, num_matches)
    assert [hit["item"] for hit in some["hits"]] == [item for _, item in order[5:num_matches]]
    (none,) = search(ask, classes=[0], threshold=1e9)["results"]
    assert (none["threshold_source"], none["total"], none["matches"]) == ("request", 0, 0)
    assert none["hits"] == []


def test_a_thumbnail_is_a_reduced_image_of_its_item(ask: Ask, bundle: Path, tmp_path: Path) -> None:
    pixels = np.zeros((400, 1000, 3), np.uint8)
    pixels[:, :500] = (0, 0, 255)  # red on the left
    for name in ("a.jpg", "b.png", "c.bmp"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(cv2.imencode(name[1:], pixels)[1].tobytes())
    (tmp_path / "in" / "d.png").write_bytes(image(1))
    index_gallery(bundle, tmp_path / "in", "-o", tmp_path / "out")
    index_gallery(bundle, tmp_path / "in", "-o", tmp_path / "bare", "--no-thumbnails")
    ask = requester(bundle, big=tmp_path / "out", bare=tmp_path / "bare")
    for index, size in enumerate([(64, 160), (64, 160), (64, 160), (20, 30)]):
        response = ask("GET", f"/v1/galleries/big/items/{index}/thumbnail")
        assert response.headers["content-type"] == "image/jpeg"
        small = cv2.imdecode(np.frombuffer(response.content, np.uint8), cv2.IMREAD_COLOR)
        assert small.shape[:2] == size
        if index < 3:
            assert abs(small[30, 20].astype(int) - (0, 0, 255)).max() < 20
            assert small[30, 140].max() < 20
    response = ask("GET", "/v1/galleries/bare/items/0/thumbnail")
    assert refusal(response) == (404, "no_thumbnail")


def test_an_id_of_an_item_of_another_version_of_the_gallery_is_unknown(ask: Ask) -> None:
    (result,) = search(ask, classes=["husky"], limit=1)["results"]
    item_id, index = result["hits"][0]["id"], result["hits"][0]["item"]
    by_index, by_id = (
        ask("GET", f"/v1/galleries/pets/items/{one}/thumbnail") for one in (index, item_id)
    )
    assert by_id.content == by_index.content
    response = ask("GET", f"/v1/galleries/pets/items/{index}.00000000/thumbnail")
    assert refusal(response) == (404, "unknown_item")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("pets/search", b"", 400, "empty_body"),
        ("pets/search", b'{"classes": [0], "limit": 1001}', 422, "invalid_query"),
        ("pets/search", b'{"classes": [0], "gallery": 1}', 422, "invalid_query"),
        ("pets/search", json.dumps({"classes": [0] * 11, "limit": 1000}), 422, "invalid_query"),
        ("pets/search", json.dumps({"classes": [0] * 101}), 413, "too_many_classes"),
        ("cats/search", b'{"classes": [0]}', 404, "unknown_gallery"),
        ("..%2fpets/search", b'{"classes": [0]}', 404, "no_such_path"),
        ("pets/items/28/thumbnail", None, 404, "unknown_item"),
        ("pets/items/-1/thumbnail", None, 422, "invalid_parameter"),
    ],
)
def test_invalid_requests_are_rejected_with_an_error_code(
    ask: Ask, path: str, body: bytes | None, status: int, code: str
) -> None:
    method = "GET" if body is None else "POST"
    response = ask(method, f"/v1/galleries/{path}", content=body)
    assert refusal(response) == (status, code), response.text
    if code == "unknown_gallery":
        assert "pets" in response.json()["error"]["message"]


def test_the_best_items_are_ordered_by_index_if_their_scores_are_equal() -> None:
    for seed in range(30):
        scores = np.random.default_rng(seed).integers(0, 1 + seed, 200).astype(np.float32)
        order = sorted(range(200), key=lambda index: (-scores[index], index))
        for start, end in [(0, 0), (0, 1), (0, 17), (16, 60), (190, 240), (0, 500), (200, 201)]:
            assert best(scores, start, end).tolist() == order[start:end]


# ---------------------------------------------------------------------------- texts


def test_a_file_of_texts_can_be_indexed(tmp_path: Path) -> None:
    bundle = write_of_texts(tmp_path / "texts")
    file, path = tmp_path / "lines.txt", tmp_path / "out"
    content = "\ufeffa cat\r\nand a dog\n\n猫 🐶\n".encode() + b"\xff\nhund\n"
    content += b"a cat and a dog " * 100 + b"\n" + b"x" * 2_500_000 + b"\n"
    file.write_bytes(content + b"a dog")
    assert summary(index_gallery(bundle, file, "-o", path)) == 7
    reasons = unreadable(path)
    assert reasons["5"] == "invalid UTF-8 at byte 0"
    assert "size of 2500001 bytes exceeds" in reasons["8"]

    ask = requester(bundle, pets=path)
    (result,) = search(ask, classes=["samoyed"])["results"]
    hits = {hit["name"]: hit for hit in result["hits"]}
    texts = {"1": "a cat", "2": "and a dog", "3": "", "4": "猫 🐶", "6": "hund", "9": "a dog"}
    assert {name: hits[name]["text"] for name in texts} == texts
    assert hits["7"]["text"] == ("a cat and a dog " * 100)[:499] + "…"
    for name, text in texts.items():
        body = {"classes": ["samoyed"], "texts": [text]}
        verdict = ask("POST", "/v1/query", json=body).json()["results"][0]["verdicts"][0]
        assert hits[name]["score"] == pytest.approx(verdict["score"], rel=1e-4, abs=1e-5)
    response = ask("GET", "/v1/galleries/pets/items/0/thumbnail")
    assert refusal(response) == (404, "no_thumbnail")

    with pytest.raises(FileNotFoundError, match="is not a file: the model requires texts"):
        index_gallery(bundle, tmp_path, "-o", path)

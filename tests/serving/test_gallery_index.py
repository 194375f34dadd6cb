"""The approximate index of a gallery: its recall, its exact scores, and when it is used."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads.logit_maps import Cosine, Dot
from serving.answer import make_query
from serving.galleries import building
from serving.galleries.building import index_collection
from serving.galleries.collection import open_collection
from serving.galleries.gallery import Gallery, GalleryInfo, read_info
from serving.galleries.index import MAX_HITS
from serving.galleries.searching import Galleries, Page
from serving.model import Model
from serving.schemas import Hits
from tests.serving.started import index_gallery
from tests.serving.test_galleries import fill, requester, search
from tests.tiny_bundle import DIM, NAMES, write
from trainer.bundle.bundle import Bundle

NUM = 6000
EVERY_CLASS = list(range(len(NAMES)))


class Synthetic(Model):
    """Returns given features. The files of the collection contain the index of their row."""

    rows: np.ndarray

    def prepare(self, raw: bytes | str) -> Any:
        return int(raw)

    def features(self, prepared: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(self.rows[list(prepared)])


def clustered(num: int = NUM) -> np.ndarray:
    """Return features of 40 clusters with different norms, and some that are equal."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((40, DIM))
    found = centers[random.integers(0, 40, num)] + 0.2 * random.standard_normal((num, DIM))
    found *= random.uniform(0.8, 1.2, (num, 1))
    found[1::10] = found[::10]
    return found.astype(np.float32)


def build(
    bundle: Path, folder: Path, features: np.ndarray, index: bool | None = None
) -> GalleryInfo:
    images = folder / "images"
    if not images.exists():
        images.mkdir()
        for row in range(len(features)):
            (images / f"{row:05d}.png").write_text(str(row))
    collection, model = open_collection(images, "images"), Synthetic.open(bundle)
    model.rows = features
    options: dict[str, Any] = {"batch_size": 1000, "thumbnails": False, "index": index}
    return index_collection(model, collection, folder / "gallery", **options)


@pytest.fixture(scope="module", params=["dot", "cosine"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logits = Dot() if request.param == "dot" else Cosine(scale=16.0)
    path = tmp_path_factory.mktemp("bundles") / "pets"
    return write(path, bias=False, changes={"logits": logits.model_dump()})


@pytest.fixture(scope="module")
def gallery(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    build(bundle, folder, clustered(), index=True)
    return folder / "gallery"


@pytest.fixture
def galleries(bundle: Path, gallery: Path) -> Galleries:
    return Galleries({"pets": gallery}, Bundle.open(bundle))


def of_classes(galleries: Galleries, bundle: Path, page: Page, **fields: float) -> Hits:
    return galleries.search("pets", make_query(Bundle.open(bundle), EVERY_CLASS, **fields), page)


def logits_of(bundle: Path, features: np.ndarray) -> np.ndarray:
    opened = Bundle.open(bundle)
    weights = opened.rows(EVERY_CLASS).rows.numpy()
    if opened.spec.logits.normalizes:
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
        weights = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    return opened.spec.logits.scale * features @ weights.T


def test_the_recall_is_what_the_gallery_states(
    galleries: Galleries, bundle: Path, gallery: Path
) -> None:
    info = read_info(gallery).index
    assert info is not None
    assert 1 <= info.num_probes <= info.num_lists / 8
    assert 0.95 <= info.recall[100] <= 1
    approximate = of_classes(galleries, bundle, Page(0, 100)).results
    best = np.argsort(-logits_of(bundle, clustered()), axis=0, kind="stable")
    for depth, stated in info.recall.items():
        shares = [
            len({hit.item for hit in found.hits[:depth]} & set(best[:depth, class_id])) / depth
            for class_id, found in enumerate(approximate)
        ]
        assert np.mean(shares) == pytest.approx(stated, abs=0.02)  # equal items may be exchanged


def test_an_approximate_search_returns_exact_scores_in_order(
    galleries: Galleries, bundle: Path
) -> None:
    expected = logits_of(bundle, clustered())
    found = of_classes(galleries, bundle, Page(0, 100))
    assert not found.exact
    for class_id, result in enumerate(found.results):
        assert (result.total, result.matches, len(result.hits)) == (MAX_HITS, None, 100)
        items, scores = zip(*[(hit.item, hit.score) for hit in result.hits], strict=True)
        np.testing.assert_allclose(scores, expected[list(items), class_id], rtol=1e-4, atol=1e-4)
        assert list(scores) == sorted(scores, reverse=True)
    first = found.results[0].hits
    pages = [of_classes(galleries, bundle, Page(n, 40, exact=False)) for n in (0, 40, 80, MAX_HITS)]
    assert [hit for page in pages for hit in page.results[0].hits] == first
    reaching = of_classes(galleries, bundle, Page(0, 100), threshold=first[41].score).results[0]
    assert [hit.id for hit in reaching.hits] == [hit.id for hit in first[: reaching.total]]
    assert 42 <= reaching.total < 60
    assert (reaching.matches, {hit.match for hit in reaching.hits}) == (None, {True})


def test_a_search_is_exact_on_request_and_beyond_the_hits_of_the_measured_recall(
    galleries: Galleries, bundle: Path
) -> None:
    assert not of_classes(galleries, bundle, Page(MAX_HITS - 1, 1)).exact
    expected = -np.sort(-logits_of(bundle, clustered()), axis=0)
    for page in (Page(0, MAX_HITS + 1), Page(MAX_HITS, 1), Page(0, 50, exact=True)):
        found = of_classes(galleries, bundle, page, threshold=-1e9)
        assert found.exact
        for class_id, result in enumerate(found.results):
            assert (result.total, result.matches) == (NUM, NUM)
            scores = expected[page.offset : page.offset + page.limit, class_id]
            found_scores = [hit.score for hit in result.hits]
            np.testing.assert_allclose(found_scores, scores, rtol=1e-4, atol=1e-4)


def test_an_index_with_a_low_recall_is_used_only_on_request(
    bundle: Path, gallery: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(gallery, tmp_path / "copy")
    text = json.loads((copy / "gallery.json").read_text())
    text["index"]["recall"]["100"] = 0.9
    (copy / "gallery.json").write_text(json.dumps(text))
    galleries = Galleries({"pets": copy}, Bundle.open(bundle))
    assert of_classes(galleries, bundle, Page(0, 1)).exact
    assert not of_classes(galleries, bundle, Page(0, 1, exact=False)).exact


def test_only_large_galleries_are_indexed_by_default(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, path = clustered(200), tmp_path / "gallery"
    monkeypatch.setattr(building, "LEAST_ITEMS", 199)
    assert build(bundle, tmp_path, features).index is not None
    Gallery(path, Bundle.open(bundle)).verify()
    monkeypatch.setattr(building, "LEAST_ITEMS", 200)
    info = build(bundle, tmp_path, features)
    assert (info.index, info.format_version) == (None, 1)
    assert not (path / "index.faiss").exists()


def test_scores_that_do_not_increase_with_the_product_have_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = {"kind": "spherical", "aligned": False, "score": "spherical", "eps": 1.0}
    bundle = write(tmp_path / "b", changes={"loss": loss})
    monkeypatch.setattr(building, "LEAST_ITEMS", 0)
    assert build(bundle, tmp_path, clustered(100)).index is None
    with pytest.raises(ValueError, match="does not support: omit --index"):
        build(bundle, tmp_path, clustered(100), index=True)


@pytest.mark.parametrize("size", [0, 5000])
def test_an_error_names_a_damaged_index(
    bundle: Path, gallery: Path, tmp_path: Path, size: int
) -> None:
    file = shutil.copytree(gallery, tmp_path / "copy") / "index.faiss"
    file.write_bytes(file.read_bytes()[:size] + bytes(file.stat().st_size - size))
    with pytest.raises(ValueError, match=r"index\.faiss (is damaged|does not)"):
        Gallery(file.parent, Bundle.open(bundle)).verify()


def test_the_server_states_the_recall_and_whether_a_search_was_exact(tmp_path: Path) -> None:
    bundle = write(tmp_path / "pets")
    output = index_gallery(bundle, fill(tmp_path / "in"), "-o", tmp_path / "out", "--index")
    assert "approximate index of 1 lists, of which a search reads 1; recall 1.000 at 10" in output
    ask = requester(bundle, pets=tmp_path / "out")
    (described,) = ask("GET", "/v1/galleries").json()["galleries"]
    recall = {"10": 1.0, "100": 1.0}
    assert described["index"] == {"is_default": True, "num_queries": 7, "recall": recall}
    assert not search(ask, classes=["husky"], limit=20)["exact"]
    assert search(ask, classes=["husky"], exact=True)["exact"]

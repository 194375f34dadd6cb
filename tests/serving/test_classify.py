"""`POST /v1/classify` and the ranking of all classes that it returns.

The real routes and service run in this process and listen on a port, but without Ray.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from serving.answer import top_classes
from serving.client import Client
from serving.model import Model
from tests.noise_images import image
from tests.serving.in_process import application, listening
from tests.tiny_bundle import DIM, NAMES, rows, write
from trainer.bundle import row_file
from trainer.bundle.bundle import Bundle


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with listening(application(bundle, max_inputs=3)) as url:
        yield url


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return [image(seed) for seed in range(7)]


def expected(bundle: Path, files: list[bytes], top: int) -> list[list[tuple[str, float]]]:
    """Rank the scores of all classes, computed by class id."""
    model = Model.open(bundle)
    features = model.features([model.prepare(one) for one in files])
    scores = model.bundle.scores(features, range(len(NAMES)))
    best = scores.sort(dim=1, descending=True, stable=True)
    return [
        [(NAMES[j], score) for j, score in zip(ids[:top], row[:top], strict=True)]
        for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def found(answer: dict) -> list[list[tuple[str, float]]]:
    assert [one["input"] for one in answer["results"]] == list(range(len(answer["results"])))
    ids = [one["class_id"] for result in answer["results"] for one in result["classes"]]
    names = [one["class"] for result in answer["results"] for one in result["classes"]]
    assert names == [NAMES[j] for j in ids]
    return [[(one["class"], one["score"]) for one in r["classes"]] for r in answer["results"]]


def assert_ranked(answer: dict, wanted: list[list[tuple[str, float]]]) -> None:
    for ours, theirs in zip(found(answer), wanted, strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        scores = [[score for _, score in one] for one in (ours, theirs)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-5)


def test_json_a_form_and_a_raw_body_return_the_best_classes(
    bundle: Path, url: str, files: list[bytes]
) -> None:
    images = [base64.b64encode(one).decode() for one in files[:2]]
    wanted = expected(bundle, files[:2], 3)
    as_json = httpx.post(f"{url}/v1/classify", json={"images": images, "top": 3})
    assert_ranked(as_json.json(), wanted)
    uploads = [("images", one) for one in files[:2]]
    assert_ranked(httpx.post(f"{url}/v1/classify", data={"top": "3"}, files=uploads).json(), wanted)
    kind = {"content-type": "image/png"}
    raw = httpx.post(f"{url}/v1/classify?top=3", content=files[0], headers=kind)
    assert_ranked(raw.json(), wanted[:1])


def test_the_client_splits_many_images(bundle: Path, url: str, files: list[bytes]) -> None:
    with Client(url) as client:
        answer = client.classify(files, top=2)
    assert_ranked(answer.model_dump(), expected(bundle, files, 2))


@pytest.mark.parametrize("block_rows", [1, 2, 3, 7, 100])
def test_the_ranking_is_exact_for_every_block_size(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(row_file, "_MAX_BLOCK_ROWS", block_rows)
    features = torch.randn(6, DIM)
    opened = Bundle.open(bundle)
    scores, ids = top_classes(opened, features, 4)
    wanted = opened.scores(features, range(len(NAMES))).topk(4, dim=1)
    torch.testing.assert_close(scores, wanted.values)
    assert ids.tolist() == wanted.indices.tolist()


@pytest.mark.parametrize("block_rows", [2, 100])
def test_equal_scores_are_ranked_by_class_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(row_file, "_MAX_BLOCK_ROWS", block_rows)
    equal: Tensor = rows()[:1].repeat(len(NAMES), 1)
    opened = Bundle.open(write(tmp_path / "equal", blocks=[equal]))
    _, ids = top_classes(opened, torch.randn(2, DIM), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2

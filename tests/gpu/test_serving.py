"""A model gives the same verdicts on a GPU as on the CPU."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from serving.answer import make_query
from serving.model import Model
from tests.tiny_bundle import WAYS_TO_ASK, write, write_of_texts


@pytest.mark.parametrize("make", [write, write_of_texts])
def test_a_model_gives_the_same_verdicts_on_a_gpu_as_on_the_cpu(make, device, tmp_path: Path):
    path = make(tmp_path / "bundle")
    model, other = Model.open(path, device=device.type), Model.open(path)
    model.self_check()
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (20, 33, 3), dtype=np.uint8) for _ in range(3)]
    files = [cv2.imencode(".png", image)[1].tobytes() for image in images]
    raw = files if make is write else ["a cat", "猫 und a dog " * 9, "x"]
    prepared = [model.prepare(sample) for sample in raw]
    query = make_query(model.bundle, list(WAYS_TO_ASK))
    assert model.features(prepared).device.type == "cpu"
    found, expected = (each.answer(prepared, query) for each in (model, other))
    for ours, theirs in zip(found.results, expected.results, strict=True):
        scores = [[verdict.score for verdict in result.verdicts] for result in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)

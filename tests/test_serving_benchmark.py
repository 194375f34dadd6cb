"""The bundles of the serving benchmarks can be served."""

from pathlib import Path

import numpy as np

from benchmarks.serving import NEGLIGIBLE, stretch, write_random
from serving.answer import answer, make_query
from serving.model import Model
from tests.noise_images import image


def test_a_random_bundle_answers_queries(tmp_path: Path) -> None:
    bundle, last = tmp_path / "bundle", 1999
    write_random(bundle, NEGLIGIBLE, 100, size=8)
    stretch(bundle, last + 1, np.array([1, last]))
    model = Model.open(bundle)
    model.self_check()
    features = model.features([model.prepare(image(0, 8, 8, ".jpg"))])
    query = make_query(model.bundle, [1, last], recall=0.9)
    (found,) = answer(model.bundle, features, query).results
    assert [verdict.class_id for verdict in found.verdicts] == [1, last]
    assert all(np.isfinite(verdict.score) for verdict in found.verdicts)

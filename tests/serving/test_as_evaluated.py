"""A bundle gives the verdicts of the evaluation after training, which used different batches."""

from pathlib import Path

import numpy as np
import pytest

from serving.answer import make_query
from serving.model import Model
from tests.serving.evaluated import RECALL, evaluated
from tests.shards import glyph_recipe, text_recipe


@pytest.mark.parametrize(
    ("is_text", "card"),
    [(True, ["24 tokens", '--text "TEXT"']), (False, ["16 x 16 x 1", "10 crops", " IMAGE"])],
)
def test_verdicts_are_those_of_the_evaluation(
    is_text: bool, card: list[str], texts: Path, glyphs: Path, tmp_path: Path
) -> None:
    crops = {"data__image__resize": 18, "data__image__crops": 10}
    run = tmp_path / "run"
    recipe = text_recipe(texts, run) if is_text else glyph_recipe(glyphs, run, **crops)
    found = evaluated(recipe, tmp_path / "bundle")
    written = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert all(part in written for part in card)
    model = Model.open(found.bundle)
    query = make_query(model.bundle, found.names, recall=RECALL)
    answer = model.answer([model.prepare(one) for one in found.inputs], query)
    rows = [result.verdicts for result in answer.results]
    scores = np.array([[one.score for one in row] for row in rows])
    assert scores.std(axis=1).min() > 1e-3
    np.testing.assert_allclose(scores, found.scores, rtol=1e-4, atol=1e-4)
    is_decided = np.abs(found.scores - found.thresholds) > 1e-4 * np.abs(found.scores).max()
    matches = np.array([[one.match for one in row] for row in rows])
    assert (matches == found.decisions)[is_decided].all()

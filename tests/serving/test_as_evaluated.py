"""A bundle returns the same logits that the evaluation after training computed."""

import math
from pathlib import Path

import numpy as np
import pytest

from data.shards.split import open_split
from serving.answer import make_query
from serving.model import Model
from tests.ranks import rank_world
from tests.shards import glyph_recipe, text_recipe
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.train import train


def of_texts(texts: Path, glyphs: Path, run: Path) -> Recipe:
    return text_recipe(texts, run)


def of_crops(texts: Path, glyphs: Path, run: Path) -> Recipe:
    return glyph_recipe(glyphs, run, data__image__resize=18, data__image__crops=10)


@pytest.mark.parametrize(
    ("make", "card"),
    [
        (of_texts, ["24 tokens", '--text "TEXT"']),
        (of_crops, ["16 x 16 x 1", "10 crops", " IMAGE"]),
    ],
)
def test_evaluation_thresholds_are_logits_of_the_bundle(make, card, texts, glyphs, tmp_path):
    """The evaluation used different batches. This test also checks that the model card describes
    the inputs.
    """
    recipe = make(texts, glyphs, tmp_path / "run")
    train(recipe, rank_world())
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    written = (tmp_path / "bundle" / "MODEL_CARD.md").read_text()
    assert all(part in written for part in card)
    model = Model.open(tmp_path / "bundle")
    model.self_check()
    with open_split(recipe.data.shards, "test") as split:
        raw = [split.read(i)[0] for i in range(len(split))]
        labels, classes = split.labels, range(split.num_classes)
    inputs = [one.decode() for one in raw] if make is of_texts else raw
    found = model.answer(
        [model.prepare(one) for one in inputs], make_query(model.bundle, list(classes))
    )
    logits = np.array([[v.score for v in result.verdicts] for result in found.results])
    assert logits.std(axis=1).min() > 1e-3
    true = np.sort(logits[np.arange(len(labels)), labels])
    for entry in model.bundle.spec.recalls:
        wanted = true[len(true) - math.ceil(entry.recall * len(true))]
        assert entry.pooled == pytest.approx(wanted, rel=1e-4)

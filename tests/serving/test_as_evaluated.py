"""A bundle gives the verdicts of the evaluation after training, which used different batches."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.loading.loader import EvalLoader
from data.shards.split import open_split
from serving.answer import make_query
from serving.model import Model
from tests.ranks import rank_world
from tests.shards import glyph_recipe, text_recipe
from trainer.bundle.export import export_run
from trainer.evaluation import load_evaluation
from trainer.evaluation.class_scores import gathered_rows
from trainer.run.folder import RunFolder
from trainer.run.trained_run import TrainedRun, open_trained
from trainer.train import train

RECALL = 0.9


def scores_of(trained: TrainedRun) -> np.ndarray:
    """Compute the scores [N, K] of the validation set with the functions of the evaluation."""
    recipe, world, head = trained.recipe, rank_world(), trained.task.head
    with open_split(recipe.data.shards, recipe.data.eval_split) as split, torch.no_grad():
        loader = EvalLoader(split, recipe.data, batch=recipe.evaluation.batch)
        rows = gathered_rows(trained.task, loader, world)
        (block,) = head.score_blocks(rows.features, head.num_classes)
    return block.scores[:, block.class_ids.argsort()].numpy()


@pytest.mark.parametrize(
    ("is_text", "card"),
    [(True, ["24 tokens", '--text "TEXT"']), (False, ["16 x 16 x 1", "10 crops", " IMAGE"])],
)
def test_verdicts_are_those_of_the_evaluation(
    is_text: bool, card: list[str], texts: Path, glyphs: Path, tmp_path: Path
) -> None:
    crops = {"data__image__resize": 18, "data__image__crops": 10}
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    recipe = text_recipe(texts, run) if is_text else glyph_recipe(glyphs, run, **crops)
    train(recipe, rank_world())
    export_run(run, bundle, rank_world())
    written = (bundle / "MODEL_CARD.md").read_text()
    assert all(part in written for part in card)

    trained = open_trained(run, rank_world())
    expected, names = scores_of(trained), trained.data.manifest.class_names
    saved = load_evaluation(RunFolder(run).evaluations, step=trained.step)
    thresholds = saved.promises.by_class().thresholds[:, saved.promises.recalls.index(RECALL)]
    with open_split(recipe.data.shards, recipe.data.eval_split) as split:
        order = np.arange(len(split))
        if is_text:  # the evaluation reads texts in order of their length
            order = order[np.argsort(split.sizes(order), kind="stable")]
        inputs = [split.read(int(index))[0] for index in order]

    model = Model.open(bundle)
    query = make_query(model.bundle, names, recall=RECALL)
    prepared = [model.prepare(one.decode() if is_text else one) for one in inputs]
    rows = [result.verdicts for result in model.answer(prepared, query).results]
    scores = np.array([[one.score for one in row] for row in rows])
    assert scores.std(axis=1).min() > 1e-3
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    is_decided = np.abs(expected - thresholds) > 1e-4 * np.abs(expected).max()
    matches = np.array([[one.match for one in row] for row in rows])
    assert (matches == (expected >= thresholds))[is_decided].all()

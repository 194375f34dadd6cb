"""Evaluations of a split: hierarchical softmax, equal work on all ranks, and saved results.

test_export.py compares the counts of an evaluation on one and two ranks with logits of the bundle.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from trainer.evaluation import evaluate_split, load_evaluation, save_evaluation
from trainer.task import Task, build_task


def task_and_recipe(
    shards: Path, weights: str, loss: str = "ce", class_ranks: int | None = None
) -> tuple[Task, object]:
    recipe = glyph_recipe(
        shards,
        Path("unused"),
        head__weights__kind=weights,
        head__loss__kind=loss,
        head__init_std=0.5,
        evaluation={"batch": 4, "topk": [1, 3]},
    )
    manifest = Manifest.load(shards)
    vectors = load_label_vectors(shards, manifest)
    task = build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=vectors,
        world=rank_world(class_ranks),
    )
    return task.eval(), recipe


def evaluated_over_nodes(shards: Path):
    task, recipe = task_and_recipe(shards, "vtree", "hierarchical_softmax")
    vectors = load_label_vectors(shards, Manifest.load(shards))
    result = evaluate_split(task, recipe, task.world, label_vectors=vectors)
    return result.metrics, result.reached.numpy()


def test_classes_of_a_head_over_nodes_are_those_of_the_labels(glyphs: Path) -> None:
    ((metrics, reached),) = run_on_ranks(1, evaluated_over_nodes, glyphs)
    assert reached.shape[0] == len(Manifest.load(glyphs).classes)
    for rank, (of_rank, counts) in enumerate(run_on_ranks(2, evaluated_over_nodes, glyphs)):
        assert of_rank == pytest.approx(metrics, abs=1e-9)
        if rank == 0:
            np.testing.assert_array_equal(counts, reached)


def passes_of_evaluations(shards: Path, class_ranks: int | None):
    """Count the passes of a complete evaluation, and of those that stop at the first and at the
    last check."""
    complete = forward_passes(shards, class_ranks, 0)
    return complete, *(forward_passes(shards, class_ranks, stop) for stop in (1, complete[1]))


def forward_passes(
    shards: Path, class_ranks: int | None, stop_at: int
) -> tuple[int, int, bool, bool]:
    """Return the number of backbone passes, the number of checks, whether the evaluation was
    stopped, and whether the task is in training mode afterwards.
    """
    task, recipe = task_and_recipe(shards, "dense", class_ranks=class_ranks)
    # There are 57 samples on 4 ranks: the first rank has 15 in three batches, and the others have
    # 14 in two.
    settings = recipe.evaluation.model_copy(update={"batch": 7})
    recipe = recipe.model_copy(update={"evaluation": settings})
    task.train()
    passes = checks = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == stop_at:
            raise InterruptedError

    task.backbone.register_forward_hook(count)
    try:
        evaluate_split(task, recipe, task.world, label_vectors=None, check=check)
    except InterruptedError:
        return passes, checks, True, task.training
    return passes, checks, False, task.training


@pytest.mark.parametrize("class_ranks", [4, 1])
def test_all_ranks_run_the_backbone_equally_often_and_stop_at_the_same_check(class_ranks, glyphs):
    found = run_on_ranks(4, passes_of_evaluations, glyphs, class_ranks)
    ((complete, *stopped),) = set(found)
    num_checks = complete[1]
    assert num_checks > 3  # also between blocks of classes
    assert complete == (3, num_checks, False, True)
    assert stopped == [(0, 1, True, True), (3, num_checks, True, True)]


def test_a_saved_evaluation_is_loaded_unchanged(glyphs, tmp_path):
    task, recipe = task_and_recipe(glyphs, "dense")
    result = evaluate_split(task, recipe, task.world, label_vectors=None)
    save_evaluation(tmp_path, result, step=7)
    again = load_evaluation(tmp_path, step=7)
    assert again.metrics == result.metrics
    assert again.num_samples == result.num_samples
    assert torch.equal(again.classes.threshold, result.classes.threshold)
    assert torch.equal(again.correct, result.correct)
    assert torch.equal(again.reached, result.reached)
    promises, before = asdict(again.promises), asdict(result.promises)
    assert promises.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(promises[name], value, err_msg=name)
    assert torch.equal(again.confusions, result.confusions)
    assert len(result.confusions)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000007.json",
        "step-00000007.safetensors",
    }
    with pytest.raises(FileNotFoundError, match="run `kway eval`"):
        load_evaluation(tmp_path, step=8)

"""Evaluations of label sets match a computation in float64 and are the same on every mesh."""

import numpy as np
import pytest
import torch

from heads import LabelSets
from heads.set_measures import inverse_propensities
from tests.heads.set_cases import label_sets
from tests.ranks import rank_world, run_on_ranks
from tests.trainer.test_evaluation_measures import (
    DIM,
    MESHES,
    NUM_CLASSES,
    WEIGHTINGS,
    head_of,
    logits,
    problem,
    results_of,
    rows_of_group,
)
from trainer.config import EvalConfig
from trainer.evaluation import measure
from trainer.evaluation.class_scores import SplitRows
from trainer.promises import make_promises

CONFIG = EvalConfig(topk=(1, 3, 20), recalls=(0.5, 0.9))
TRAIN = 60


def sets_of(num_rows: int) -> list[list[int]]:
    """The last three classes have no samples."""
    return label_sets(NUM_CLASSES - 3, num_rows, seed=2)


def weights() -> torch.Tensor:
    counts = torch.bincount(LabelSets.of(sets_of(TRAIN)).labels, minlength=NUM_CLASSES)
    return inverse_propensities(counts, TRAIN)


def measured(class_ranks, sizes, weighting="dense", memory_mib=256):
    world = rank_world(class_ranks)
    features, *_ = problem(sum(sizes))
    rows = rows_of_group(world, features, LabelSets.of(sets_of(sum(sizes))), sizes)
    head = head_of(world, weighting, memory_mib)
    found = measure(head, rows, CONFIG, world, inverse_propensities=weights())
    assert found.num_samples == sum(sizes)
    assert found.confusions.shape == (0, 3)
    return results_of(found, world)


def naive_at(k: int, scores: np.ndarray, is_true: np.ndarray) -> dict[str, float]:
    """The measures at k, one row at a time."""
    gains, best = weights().numpy(), np.argsort(-scores, axis=1, kind="stable")[:, :k]
    discounts = 1 / np.log2(np.arange(2, NUM_CLASSES + 2))
    found, found_gain, most = [], 0.0, 0.0
    for row, true in zip(best, is_true, strict=True):
        hits, size = true[row].astype(float), int(true.sum())
        dcg = (hits * discounts[: len(row)]).sum()
        largest = discounts[: min(len(row), size)].sum()
        recall, ndcg = (hits.sum() / size, dcg / largest) if size else (0.0, 0.0)
        found.append([hits.sum() / len(row), recall, ndcg])
        found_gain += gains[row] @ hits
        most += np.sort(gains[true])[::-1][:k].sum()
    means = dict(zip(("precision", "recall", "ndcg"), np.mean(found, axis=0), strict=True))
    return {f"{name}_at_{k}": value for name, value in means.items()} | {
        f"psp_at_{k}": found_gain / most
    }


@pytest.mark.parametrize("memory_mib", [256, 0], ids=["one block", "one class per block"])
@pytest.mark.parametrize("weighting", ["dense", "vtree"])
def test_measures_equal_a_brute_force_computation_in_float64(weighting, memory_mib):
    # Import this here, because every rank imports this module.
    from sklearn.metrics import average_precision_score, f1_score

    features, *_ = problem(40)
    scores, sets = logits(features, weighting), sets_of(40)
    is_true = np.zeros(scores.shape, bool)
    for row, labels in enumerate(sets):
        is_true[row, labels] = True
    metrics, found = measured(None, [40], weighting, memory_mib)

    expected = naive_at(1, scores, is_true) | naive_at(3, scores, is_true)
    every = naive_at(NUM_CLASSES, scores, is_true)
    expected |= {name.replace("_13", "_20"): value for name, value in every.items()}
    rows, classes = np.nonzero(is_true)
    groups = np.zeros(NUM_CLASSES, np.int64)  # too few classes for groups of similar classes
    promises = make_promises(scores[rows, classes], classes, groups, (0.5, 0.9), 0.9).by_class()
    np.testing.assert_array_equal(found["promised"], promises.thresholds)
    np.testing.assert_array_equal(found["kinds"], promises.kinds)
    reaches = scores[:, :, None] >= promises.thresholds
    np.testing.assert_array_equal(found["reached"][..., 1], reaches.sum(0))
    np.testing.assert_array_equal(found["reached"][..., 0], (reaches & is_true[..., None]).sum(0))
    for column, recall in enumerate(CONFIG.recalls):
        for average in ("micro", "macro"):
            f1 = f1_score(is_true, reaches[..., column], average=average, zero_division=0)
            expected[f"{average}_f1_at_recall_{recall:g}"] = f1
    first = scores.argmax(1)
    is_correct = is_true[np.arange(40), first]
    np.testing.assert_array_equal(
        found["correct"], np.bincount(first[is_correct], minlength=NUM_CLASSES)
    )
    np.testing.assert_array_equal(found["positives"], is_true.sum(0))
    precisions = [
        average_precision_score(is_true[:, j], scores[:, j])
        for j in range(NUM_CLASSES)
        if is_true[:, j].any()
    ]
    assert len(precisions) < NUM_CLASSES
    expected["auprc"] = np.mean(precisions)
    for recall in CONFIG.recalls:
        name = f"precision_at_recall_{recall:g}"
        expected[name] = metrics[name]  # means of `precision_at`
    assert metrics == pytest.approx(expected, abs=1e-12)


def found_on_four_ranks():
    return {
        (mesh, weighting): measured(mesh[1], sizes, weighting, memory_mib)
        for mesh, sizes in MESHES.items()
        for weighting, memory_mib in WEIGHTINGS.items()
    }


def test_every_mesh_computes_the_same_measures_as_one_process():
    of_ranks = run_on_ranks(4, found_on_four_ranks)
    for weighting in WEIGHTINGS:
        expected, arrays = measured(None, [23], weighting)
        for mesh in MESHES:
            for rank in of_ranks:
                metrics, found = rank[mesh, weighting]
                assert metrics == pytest.approx(expected, abs=1e-12)
                for name, array in found.items():
                    np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def test_sets_of_one_label_have_the_measures_of_one_label_per_sample():
    world, (features, labels, _) = rank_world(), problem(40)
    head = head_of(world, "dense")
    sets = LabelSets(labels, torch.arange(41))
    one, other = (
        measure(head, SplitRows(features, each), CONFIG, world) for each in (labels, sets)
    )
    for k in (1, 3):
        assert other.metrics[f"recall_at_{k}"] == pytest.approx(one.metrics[f"top{k}"])
    for name in ("auprc", "precision_at_recall_0.9"):
        assert other.metrics[name] == one.metrics[name]
    for found in ("correct", "reached"):
        assert torch.equal(getattr(one, found), getattr(other, found))
    np.testing.assert_array_equal(one.promises.thresholds, other.promises.thresholds)


def test_a_split_without_labels_is_an_error():
    rows = SplitRows(torch.zeros(2, DIM, dtype=torch.float64), LabelSets.of([[], []]))
    with pytest.raises(ValueError, match="no sample of the split has a label"):
        measure(head_of(rank_world(), "dense"), rows, CONFIG, rank_world())

"""SLC metrics match scikit-learn and their definitions."""

import math

import numpy as np
import pytest
import torch

import heads.slc
from heads.slc import ClassMeasures, block_measures

RECALLS = (0.5, 0.9, 0.99, 1.0)


def naive_at_recall(true: np.ndarray, scores: np.ndarray, recall: float) -> tuple[float, float]:
    """Return the largest score of a positive that reaches `recall` when used as the threshold, and
    the precision at that threshold."""
    for threshold in sorted(true, reverse=True):
        if (true >= threshold).sum() >= recall * len(true) - 1e-9:
            return threshold, (true >= threshold).sum() / (scores >= threshold).sum()
    raise AssertionError


def check_against_definitions(measures: ClassMeasures, scores, labels) -> None:
    # Imported here, because scikit-learn would slow down test collection.
    from sklearn.metrics import average_precision_score, precision_recall_curve

    for row, class_id in enumerate(measures.class_ids.tolist()):
        is_true = (labels == class_id).numpy()
        column = scores[:, row].double().numpy()
        assert measures.positives[row] == is_true.sum()
        if not is_true.any():
            assert measures.average_precision[row].isnan()
            assert measures.precision_at[row].isnan().all()
            assert measures.threshold[row].isnan().all()
            continue
        expected = average_precision_score(is_true, column)
        assert measures.average_precision[row].item() == pytest.approx(expected, abs=1e-12)
        precision, recall, at = precision_recall_curve(is_true, column)
        for r, target in enumerate(measures.recalls):
            threshold, naive = naive_at_recall(column[is_true], column, target)
            assert measures.threshold[row, r].item() == threshold
            assert measures.precision_at[row, r].item() == pytest.approx(naive, abs=1e-12)
            index = np.flatnonzero(at == threshold)
            assert precision[index] == pytest.approx(naive, abs=1e-12)
            assert recall[index] >= target - 1e-9


@pytest.mark.parametrize(
    ("dtype", "values", "chunk"),
    [(torch.float32, 3, 50), (torch.float64, 20, 1 << 22), (torch.float32, None, 50)],
    ids=["many ties", "some ties", "no ties"],
)
def test_measures_match_scikit_learn(dtype, values, chunk, monkeypatch):
    monkeypatch.setattr(heads.slc, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(11)
    labels = torch.randint(0, 9, (300,), generator=generator)
    labels[labels == 4] = 100  # class 4 has no samples; class 100 is not in the block
    class_ids = torch.tensor([8, 0, 4, 7, 1, 2, 3])
    scores = torch.randn(300, 7, generator=generator, dtype=dtype)
    scores += 0.7 * (labels[:, None] == class_ids)
    if values is not None:
        scores = (scores * values / 6).round()
    measures = block_measures(scores, labels, class_ids, RECALLS)
    assert measures.threshold.dtype == dtype
    check_against_definitions(measures, scores, labels)


def test_infinite_scores_are_supported():
    scores = torch.tensor([[math.inf, -math.inf, 1.0, math.inf, -math.inf, 0.0]]).T
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    measures = block_measures(scores, labels, torch.tensor([0]), (0.3, 0.6, 1.0))
    assert measures.threshold[0].tolist() == [math.inf, 1.0, -math.inf]
    assert measures.precision_at[0].tolist() == pytest.approx([1 / 2, 2 / 3, 3 / 6])
    assert measures.average_precision[0].item() == pytest.approx((1 / 2 + 2 / 3 + 3 / 6) / 3)


def test_measures_of_a_block_without_samples_are_nan():
    nothing = block_measures(torch.empty(0, 3), torch.empty(0, dtype=torch.long), torch.arange(3))
    assert nothing.positives.tolist() == [0, 0, 0]
    assert nothing.average_precision.isnan().all()
    with pytest.raises(ValueError, match="at least one class with a sample"):
        nothing.summary()


def test_empty_measures_of_a_rank_without_classes_can_be_concatenated():
    labels = torch.tensor([0, 1, -1])
    empty = block_measures(torch.empty(3, 0), labels, torch.arange(0))
    assert empty.threshold.shape == (0, 2)
    other = block_measures(torch.eye(3)[:, :2], labels, torch.arange(2))
    joined = ClassMeasures.concatenate([empty, other])
    assert joined.class_ids.tolist() == [0, 1]
    assert joined.average_precision.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("num", "recall", "rank"),
    [(100, 0.55, 55), (100, 0.99, 99), (101, 0.99, 100), (10, 0.9, 9), (1, 0.01, 1), (3, 1.0, 3)],
)
def test_a_threshold_is_the_true_score_at_rank_ceil_recall_times_positives(num, recall, rank):
    true = torch.randperm(num, generator=torch.Generator().manual_seed(num)).double()
    labels = torch.zeros(num, dtype=torch.long)
    measures = block_measures(true[:, None], labels, torch.tensor([0]), (recall,))
    assert measures.threshold.item() == num - rank


def test_the_summary_averages_over_classes_with_samples():
    scores = torch.tensor([[3.0, 0.0, 9.0], [2.0, 1.0, 9.0], [1.0, 2.0, 9.0]])
    measures = block_measures(scores, torch.tensor([0, 1, 0]), torch.arange(3), (0.5, 0.99))
    summary = measures.summary()
    assert list(summary) == ["auprc", "precision_at_recall_0.5", "precision_at_recall_0.99"]
    # By score, the samples of class 0 are first and third, and the sample of class 1 is second.
    assert summary["auprc"] == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)
    assert summary["precision_at_recall_0.5"] == pytest.approx((1 + 1 / 2) / 2)
    assert summary["precision_at_recall_0.99"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_invalid_input_is_rejected():
    scores, labels, ids = torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), torch.arange(2)
    broken = scores.clone()
    broken[2, 1] = math.nan
    with pytest.raises(ValueError, match="class 1 is NaN"):
        block_measures(broken, labels, ids)
    with pytest.raises(ValueError, match=r"shape \(4, 2\): pass \[4, 3\]"):
        block_measures(scores, labels, torch.arange(3))
    for recall in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="recall is"):
            block_measures(scores, labels, ids, (recall,))
    with pytest.raises(ValueError, match="recalls are empty"):
        block_measures(scores, labels, ids, ())

"""Measures of label sets equal napkinXC's and scikit-learn's. tests/trainer/test_set_evaluation.py
compares them on ranks.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import LabelSets
from heads.set_measures import f1_measures, inverse_propensities, measures_at_k

CLASSES, ROWS, TRAIN, K = 40, 30, 200, 7
THRESHOLD = 1.0


def random_sets(num_rows: int, seed: int) -> list[list[int]]:
    """Up to five labels per row, more often of the first classes."""
    rng, shares = np.random.default_rng(seed), 1 / np.arange(1, CLASSES + 1)
    shares /= shares.sum()
    return [
        sorted(rng.choice(CLASSES, rng.integers(0, 6), replace=False, p=shares).tolist())
        for _ in range(num_rows)
    ]


def data() -> tuple[list[list[int]], list[list[int]], Tensor]:
    """The sets of the training samples, those of the rows, and the scores of the rows."""
    train, test = random_sets(TRAIN, 1), random_sets(ROWS, 2)
    train[0] = [CLASSES - 1]
    scores = np.random.default_rng(3).normal(size=(ROWS, CLASSES))
    for row, labels in enumerate(test):
        scores[row, labels] += 1.5
    return train, test, torch.from_numpy(np.round(scores, 6))


def best(scores: Tensor) -> Tensor:
    return scores.argsort(dim=1, descending=True, stable=True)[:, :K]


# napkinXC 0.7.2 on the same scores: precision_at_k, recall_at_k, ndcg_at_k, and psprecision_at_k
# with Jain_et_al_inverse_propensity for A = 0.55, B = 1.5 and for A = 0.5, B = 0.4.
NAPKINXC = {
    "precision": [
        0.4666666666666667, 0.4166666666666667, 0.3777777777777778, 0.2916666666666667,
        0.2733333333333334, 0.2555555555555556, 0.24761904761904763,
    ],
    "recall": [
        0.14444444444444446, 0.26833333333333337, 0.3733333333333333, 0.3844444444444444,
        0.44055555555555564, 0.48000000000000004, 0.5522222222222222,
    ],
    "ndcg": [
        0.4666666666666667, 0.44901237772892777, 0.43867527006285484, 0.40355246728192384,
        0.4211121603397824, 0.4434005117589644, 0.47612953328741586,
    ],
}  # fmt: skip
NAPKINXC_PSP = {
    (0.55, 1.5): [
        0.44827036629329353, 0.435930994409008, 0.46471247607752497, 0.4255952078921961,
        0.48224046603775783, 0.5429892913667625, 0.6216084229997865,
    ],
    (0.5, 0.4): [
        0.4581405323272699, 0.4455133131299331, 0.4714609866197088, 0.4302999530349709,
        0.4851067210228933, 0.5456655719698632, 0.6235539373941194,
    ],
}  # fmt: skip
NAPKINXC_F1 = [0.33540372670807456, 0.23147377476324843]  # micro, macro


def test_measures_at_k_equal_those_of_napkinxc() -> None:
    train, test, scores = data()
    counts = torch.bincount(LabelSets.of(train).labels, minlength=CLASSES)
    for (a, b), psp in NAPKINXC_PSP.items():
        weights = inverse_propensities(counts, TRAIN, a=a, b=b)
        found = measures_at_k(best(scores), LabelSets.of(test), weights)
        assert found.keys() == {*NAPKINXC, "psp"}
        for name, values in (NAPKINXC | {"psp": psp}).items():
            np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)
    assert measures_at_k(best(scores), LabelSets.of(test)).keys() == NAPKINXC.keys()


def test_class_ids_and_offsets_may_be_int32() -> None:
    """SciPy's compressed rows are."""
    _, test, scores = data()
    sets, weights = LabelSets.of(test), torch.linspace(1, 3, CLASSES)
    narrow = LabelSets(sets.labels.int(), sets.offsets.int())
    want = measures_at_k(best(scores), sets, weights)
    for name, values in measures_at_k(best(scores).int(), narrow, weights).items():
        assert torch.equal(values, want[name]), name


def test_the_defaults_of_the_propensities_are_those_of_the_paper() -> None:
    counts = torch.tensor([0, 3])
    scale = (np.log(50) - 1) * 2.5**0.55
    expected = 1 + scale * np.array([1.5, 4.5]) ** -0.55
    np.testing.assert_allclose(inverse_propensities(counts, 50), expected, rtol=1e-14)


def test_rows_without_labels_count_as_zero() -> None:
    sets = LabelSets.of([[], [1], []])
    predicted = torch.tensor([[0, 1], [1, 0], [1, 2]])
    found = measures_at_k(predicted, sets, torch.ones(3))
    assert found["precision"].tolist() == pytest.approx([1 / 3, 1 / 6])
    assert found["recall"].tolist() == found["ndcg"].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert found["psp"].tolist() == [1, 1]
    nothing = measures_at_k(predicted, LabelSets.of([[], [], []]), torch.ones(3))
    assert nothing.pop("psp").isnan().all()
    assert all(not values.any() for values in nothing.values())
    with pytest.raises(ValueError, match="predictions for 3 rows, but label sets of 2"):
        measures_at_k(predicted, LabelSets.of([[], [1]]))


def test_f1_equals_scikit_learn_and_napkinxc() -> None:
    from sklearn.metrics import f1_score  # slow to import

    _, test, scores = data()
    truth = torch.zeros(ROWS, CLASSES, dtype=torch.bool)
    for row, labels in enumerate(test):
        truth[row, labels] = True
    for thresholds, known in ((THRESHOLD, NAPKINXC_F1), (torch.linspace(0.2, 4.5, CLASSES), None)):
        reached = scores >= thresholds
        counts = (reached & truth).sum(0), reached.sum(0), truth.sum(0)
        found = f1_measures(*counts).tolist()
        want = [
            f1_score(truth.numpy(), reached.numpy(), average=average, zero_division=0)
            for average in ("micro", "macro")
        ]
        assert found == pytest.approx(want, rel=1e-12)
        assert known in (None, pytest.approx(found, rel=1e-12))
    assert f1_measures(*torch.zeros(3, 4)).tolist() == [0, 0]

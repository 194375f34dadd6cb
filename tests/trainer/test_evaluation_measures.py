"""Evaluation metrics match a brute-force float64 computation and are the same on every mesh."""

from collections import Counter

import numpy as np
import pytest
import torch

from heads import ClassHead
from heads.losses import CrossEntropy
from tests.heads.cases import label_tree
from tests.ranks import rank_world, run_on_ranks
from trainer.config import EvalConfig
from trainer.evaluation import measure
from trainer.evaluation.class_scores import Ranking, SplitRows, count_reached
from trainer.promises import KINDS

NUM_CLASSES, DIM = 13, 6
CONFIG = EvalConfig(topk=(1, 3), recalls=(0.5, 0.9))
# Data ranks x class ranks, and the number of rows of each data group. The numbers are uneven, and
# one of the four groups has no rows.
MESHES = {(1, 4): [23], (2, 2): [20, 3], (4, 1): [11, 0, 4, 8]}
WEIGHTINGS = {"dense": 0, "vtree": 256}  # with their `memory_mib`


def problem(num_rows: int):
    """Return features [N, d], labels [N] and label vectors. Features are multiples of 1/4 with
    some duplicate rows, and some classes have no samples.
    """
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(num_rows, DIM, generator=generator, dtype=torch.float64)
    features = (4 * features).round() / 4
    features[1::5] = features[::5][: len(features[1::5])]
    labels = torch.randint(NUM_CLASSES - 3, (num_rows,), generator=generator)
    return features, labels, torch.randn(NUM_CLASSES, 4, generator=generator)


def head_of(world, weighting: str, memory_mib: int = 256) -> ClassHead:
    head = ClassHead(
        DIM,
        label_tree(weighting, NUM_CLASSES),
        CrossEntropy(),
        mesh=world.mesh,
        seed=3,
        init_std=0.5,
        memory_mib=memory_mib,
        dtype=torch.float64,
    )
    # With rounded weights, products and sums are exact in any order, so ties are the same on every
    # mesh.
    head.weight.data = (16 * head.weight.data).round() / 16
    return head


def rows_of_group(world, features, labels, sizes) -> SplitRows:
    """Return the rows of this rank's group along `data`. `sizes` contains the number of rows of
    each group.
    """
    group = 0 if world.mesh is None else world.mesh.get_local_rank("data")
    start = sum(sizes[:group])
    part = slice(start, start + sizes[group])
    return SplitRows(features[part], labels[part])


def measured(class_ranks, sizes, weighting="dense", memory_mib=256):
    world = rank_world(class_ranks)
    features, labels, vectors = problem(sum(sizes))
    rows = rows_of_group(world, features, labels, sizes)
    head = head_of(world, weighting, memory_mib)
    return results_of(measure(head, rows, CONFIG, world, label_vectors=vectors), world)


def results_of(found, world):
    """Return the metrics and the arrays of an evaluation, as plain values."""
    promises, classes = found.promises.by_class(), found.classes
    arrays = {
        "pooled": promises.pooled,
        "promised": promises.thresholds,
        "kinds": promises.kinds,
        "pass_rates": promises.pass_rates,
        "confusions": found.confusions.numpy(),
        "correct": of_all_classes(classes, found.correct),
        "positives": of_all_classes(classes, classes.positives),
        "average_precision": of_all_classes(classes, classes.average_precision),
        "precision_at": of_all_classes(classes, classes.precision_at),
        "threshold": of_all_classes(classes, classes.threshold),
    }
    assert len(found.reached) == (NUM_CLASSES if world.is_main else 0)
    return found.metrics, arrays | ({"reached": found.reached.numpy()} if world.is_main else {})


def of_all_classes(classes, column) -> np.ndarray:
    """Return a column of the classes with samples as [K, ...], with NaN or 0 for the others."""
    absent = torch.nan if column.is_floating_point() else 0
    whole = column.new_full((NUM_CLASSES, *column.shape[1:]), absent)
    whole[classes.class_ids] = column
    return whole.numpy()


def logits(features, weighting="dense"):
    """Return all scores [N, K] at once."""
    head = head_of(rank_world(), weighting)
    scores = np.zeros((len(features), NUM_CLASSES))
    for block in head.score_blocks(features):
        scores[:, block.class_ids.numpy()] = block.scores.numpy()
    return scores


@pytest.mark.parametrize("memory_mib", [256, 0], ids=["one block", "one class per block"])
@pytest.mark.parametrize("weighting", ["dense", "vtree"])
def test_measures_equal_a_brute_force_computation_in_float64(weighting, memory_mib):
    # Import this here, because every rank imports this module.
    from sklearn.metrics import average_precision_score

    features, labels, vectors = problem(40)
    scores, labels = logits(features, weighting), labels.numpy()
    order = np.argsort(-scores, axis=1, kind="stable")
    first = order[:, 0]
    metrics, found = measured(None, [40], weighting, memory_mib)

    for k in CONFIG.topk:
        assert metrics[f"top{k}"] == (order[:, :k] == labels[:, None]).any(1).mean()
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).double().numpy()
    similar = np.clip((unit[labels] * unit[first]).sum(1), 0, 1)
    assert metrics["sa"] == pytest.approx(np.where(first == labels, 1, similar).mean(), abs=1e-6)

    counts = Counter(zip(labels.tolist(), first.tolist(), strict=True))
    wrong = [(true, guess, n) for (true, guess), n in counts.items() if true != guess]
    assert found["confusions"].tolist() == [
        list(pair) for pair in sorted(wrong, key=lambda pair: (-pair[2], pair[0], pair[1]))
    ]
    correct = [counts[j, j] for j in range(NUM_CLASSES)]
    assert found["correct"].tolist() == correct
    assert found["positives"].tolist() == np.bincount(labels, minlength=NUM_CLASSES).tolist()

    precisions = []
    for j in range(NUM_CLASSES):
        if not (labels == j).any():
            assert np.isnan(found["average_precision"][j])
            assert np.isnan(found["threshold"][j]).all()
            continue
        precisions.append(average_precision_score(labels == j, scores[:, j]))
        assert found["average_precision"][j] == pytest.approx(precisions[-1], abs=1e-12)
        true = np.sort(scores[labels == j, j])
        for r, recall in enumerate(CONFIG.recalls):
            threshold = true[len(true) - int(np.ceil(recall * len(true)))]
            assert found["threshold"][j, r] == pytest.approx(threshold, abs=1e-12)
            above = scores[:, j] >= threshold - 1e-12
            assert found["precision_at"][j, r] == pytest.approx((labels[above] == j).mean())
    assert metrics["auprc"] == pytest.approx(np.mean(precisions), abs=1e-12)
    assert len(precisions) < NUM_CLASSES

    reaches_NKR = scores[:, :, None] >= found["promised"]
    of_class = [reaches_NKR[labels == j, j].sum(0) for j in range(NUM_CLASSES)]
    np.testing.assert_array_equal(found["reached"][..., 0], of_class)
    np.testing.assert_array_equal(found["reached"][..., 1], reaches_NKR.sum(0))
    assert set(found["kinds"].flat) == {KINDS.index("pooled"), KINDS.index("guaranteed")}
    true = scores[np.arange(40), labels]
    assert ((true[:, None] >= found["pooled"]).mean(0) >= CONFIG.recalls).all()


def found_on_four_ranks():
    """Return the results of all tests that need four ranks, because starting ranks is slow."""
    meshes = {
        (mesh, weighting): measured(mesh[1], sizes, weighting, memory_mib)
        for mesh, sizes in MESHES.items()
        for weighting, memory_mib in WEIGHTINGS.items()
    }
    few = [few_classes(class_ranks) for class_ranks in (4, 1)]
    return meshes, few, {kind: error_of(kind) for kind in WRONG}


@pytest.fixture(scope="module")
def four_ranks():
    return run_on_ranks(4, found_on_four_ranks)


def test_a_score_that_equals_the_threshold_reaches_it():
    scores, labels = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1])
    counts = count_reached(scores, labels, torch.tensor([0]), torch.tensor([[2.0]]))
    assert counts.tolist() == [[[1, 2]]]


def test_a_tie_with_an_earlier_block_goes_to_the_lowest_id():
    """The blocks of a tree are in node order, so a later block may contain lower class IDs."""
    ranking, scores = Ranking(1, torch.zeros(1)), torch.ones(1, 1)
    for class_id in (7, 2, 5):
        ranking.add(scores, torch.tensor([class_id]), scores[:, 0])
    assert ranking.over_ranks(None).tolist() == [[2]]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_computes_the_same_measures_as_one_process(mesh, weighting, four_ranks):
    expected, arrays = measured(None, [23], weighting)
    for meshes, *_ in four_ranks:
        metrics, found = meshes[mesh, weighting]
        assert metrics == {**expected, "sa": metrics["sa"]}
        # "sa" is a sum of floating-point similarities, so it depends on the order of summation.
        assert metrics["sa"] == pytest.approx(expected["sa"], abs=1e-12)
        for name, array in found.items():
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def measured_with_different_budgets():
    """Return the results of two groups of rows on processors with different memory limits."""
    memory_mib = (256, 0)[torch.distributed.get_rank()]
    return measured(1, [20, 3], "dense", memory_mib)


def test_groups_on_different_processors_use_blocks_of_the_same_size():
    metrics, arrays = measured(None, [23])
    for found_metrics, found in run_on_ranks(2, measured_with_different_budgets):
        assert found_metrics == pytest.approx(metrics, abs=1e-12)
        for name, array in found.items():
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def few_classes(class_ranks) -> list[float]:
    """Return the metrics for two rows and three classes, so one of four ranks has no class."""
    world = rank_world(class_ranks)
    head = ClassHead(DIM, 3, CrossEntropy(), mesh=world.mesh, seed=1, init_std=0.5)
    features = torch.eye(DIM)[:2]
    rows = rows_of_group(world, features, torch.tensor([2, 0]), [2, 0, 0, 0])
    found = measure(head, rows, EvalConfig(topk=(1, 5)), world)
    return [*found.metrics.values(), *found.classes.threshold.flatten().tolist()]


def test_ranks_without_classes_and_groups_without_rows_do_not_change_the_measures(four_ranks):
    expected = few_classes(None)
    for _, few, _ in four_ranks:
        for found in few:
            assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert expected[1] == 1.0  # top 5 of three classes


WRONG = {
    "nan": "a score of class 12 is NaN",
    "label": "1 labels of the split are out of range 0 … 12",
    "nothing": "the split is empty",
}


def error_of(kind: str) -> str:
    """Return the error message for a NaN on one rank, a label out of range or an empty split."""
    world = rank_world(2)
    head = head_of(world, "dense")
    features, labels, _ = problem(8)
    if kind == "nan" and world.rank == 3:
        head.weight.data[-1] = torch.nan  # of the last class
    if kind == "label":
        labels[0] = NUM_CLASSES
    rows = rows_of_group(world, features, labels, [0, 0] if kind == "nothing" else [4, 4])
    with pytest.raises(ValueError, match=r"score|label|empty") as error:
        measure(head, rows, CONFIG, world)
    return str(error.value)


def test_an_error_on_one_rank_is_raised_on_all_ranks(four_ranks):
    for _, _, found in four_ranks:
        for kind, message in WRONG.items():
            assert message in found[kind]

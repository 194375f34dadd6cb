"""All-reduces of the statistics give the same loss and gradients as gathering them."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from heads import ClassHead, HierarchicalSoftmaxHead
from heads.collectives import collective_hook
from heads.engine import global_loss
from heads.engine.global_loss import reduces
from tests.heads.cases import LOSS_KINDS, gradient_of_nodes, label_tree, make_loss, problem
from tests.ranks import rank_mesh, run_on_ranks

DIM, ROWS = 5, 11
GATHERED = ("max_margin", "batch_max_margin", "topk_hinge", "smooth_topk")
KINDS = (*LOSS_KINDS, "hierarchical_softmax")


def step(kind: str, num_classes: int) -> tuple[Counter[str], list[Any]]:
    """Return the collectives of a step, and its loss and gradients."""
    tree, mesh = label_tree("vtree", num_classes), rank_mesh()
    options = {"mesh": mesh, "dtype": torch.float64, "init_std": 2.0, "seed": 1}
    if kind == "hierarchical_softmax":
        head: ClassHead = HierarchicalSoftmaxHead(DIM, tree, **options)
    else:
        head = ClassHead(DIM, tree, make_loss(kind, num_classes), **options)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = slice(ROWS * rank // world, ROWS * (rank + 1) // world)
    features, labels, _ = problem(tree, ROWS, DIM)
    features = features[mine].clone().requires_grad_()
    calls: Counter[str] = Counter()

    def count(name: str) -> Any:
        calls[name] += 1
        return nullcontext()

    with collective_hook(count):
        loss = head(features, labels[mine])
    loss.backward()
    return calls, [loss.item(), features.grad.numpy(), gradient_of_nodes(head).numpy()]


def steps(num_classes: int) -> dict[str, list[tuple[Counter[str], list[Any]]]]:
    found: dict[str, list[tuple[Counter[str], list[Any]]]] = {kind: [] for kind in KINDS}
    for threshold in (1 << 40, -(1 << 40)):  # gather, reduce
        global_loss._WORTH_A_COLLECTIVE = threshold
        for kind in KINDS:
            found[kind].append(step(kind, num_classes))
    return found


@pytest.mark.parametrize("num_classes", [13, 4])
def test_reduced_statistics_give_the_loss_and_gradients_of_gathered_ones(num_classes):
    """With 4 classes, the last of 3 ranks has no classes."""
    ranks = run_on_ranks(3, steps, num_classes)
    for kind in KINDS:
        (gathers, _), (reductions, _) = ranks[0][kind]
        more = reductions - gathers
        assert (gathers - reductions)["all_gather"] == (kind not in GATHERED), kind
        assert bool(more["all_reduce_sum"]) == (kind not in GATHERED), kind
        assert len({rank[kind][1][1][0] for rank in ranks}) == 1, kind  # the same bits everywhere
        for rank in ranks:
            (_, gathered), (_, reduced) = rank[kind]
            for ours, theirs in zip(reduced, gathered, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12, err_msg=kind)


def test_statistics_are_reduced_if_that_saves_more_bytes_than_a_collective_is_worth():
    """A rank's statistics are a logsumexp and a sum of 4 bytes per row."""
    assert not reduces(2, 8 << 20, 4 << 20)  # gathering sends 8 MiB, reducing 12 MiB
    assert not reduces(8, 8 << 10, 4 << 10)
    assert not reduces(64, 8 << 12, 4 << 12)  # saves 1.9 MiB
    assert reduces(512, 8 << 10, 4 << 10)
    assert reduces(8, 8 << 18, 4 << 18)

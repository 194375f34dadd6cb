"""Initial rows are normal deviates that depend only on (seed, class, column)."""

import math

import numpy as np
import pytest
import torch

from heads import ClassHead
from heads.losses import BinaryCrossEntropy
from heads.rows.initial_rows import initial_rows, normal_rows
from heads.weights import ClassWeights
from tests.heads.cases import WEIGHTINGS, label_tree

CPU = torch.device("cpu")
NUM_CLASSES, DIM = 9_001, 64  # a block has 4,096 rows, so this is three blocks
_MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    """The finalizer of splitmix64, in Python integers."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def deviate(seed: int, class_id: int, column: int) -> float:
    golden = 0x9E3779B97F4A7C15
    of_class = mixed((mixed((seed + golden) & _MASK) + class_id * golden) & _MASK)
    bits = mixed((of_class + (column + 1) * golden) & _MASK)
    radius = math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
    return radius * math.cos(2 * math.pi * (bits & 0xFFFFFFFF) / 2**32)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 1])
def test_each_number_is_the_box_muller_transform_of_a_hash(seed):
    classes = [0, 1, 4_095, 4_096, 10**8, 2**33]
    got = normal_rows(torch.tensor(classes), 9, seed=seed, std=1.0)
    want = [[deviate(seed, class_id, column) for column in range(9)] for class_id in classes]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_rows_depend_on_neither_the_shards_nor_the_blocks(weighting, num_ranks):
    tree = label_tree(weighting, NUM_CLASSES)
    shards = [
        initial_rows(
            ClassWeights(tree, group_rank=rank, group_size=num_ranks, device=CPU),
            DIM,
            seed=5,
            std=1.0,
        ).held
        for rank in range(num_ranks)
    ]
    leaves = np.flatnonzero((tree.class_of_node >= 0) & ~tree.has_children)
    classes = torch.from_numpy(tree.class_of_node[leaves]).long()
    want = torch.zeros(tree.num_nodes, DIM)
    want[torch.from_numpy(leaves)] = normal_rows(classes, DIM, seed=5, std=1.0)
    assert torch.equal(torch.cat(shards), want)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_class_starts_with_the_initial_bias_of_the_loss(weighting):
    """For binary cross-entropy, it gives every class the probability 1/K. In a tree, the value must
    occur once in the path of every class.
    """
    head = ClassHead(3, label_tree(weighting, 20), BinaryCrossEntropy())
    biases = torch.cat([block.bias for block in head.class_rows()])
    torch.testing.assert_close(biases.sigmoid(), torch.full((20,), 1 / 20))

"""Appending classes to a trained head preserves existing scores and moments on all ranks."""

import numpy as np
import pytest
import torch

from heads import ClassHead
from heads.append import append_classes, append_to_tree
from tests.heads.cases import label_tree, make_loss
from tests.ranks import rank_mesh, run_on_ranks

PARENTS = {"dense": [-1, -1], "utree": [0, 5], "vtree": [0, 0, 3]}


def trained_head(weighting: str, mesh=None):
    tree = label_tree(weighting, 13)
    head = ClassHead(4, tree, make_loss("ce", 13), mesh=mesh, seed=1, init_std=0.5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    step(head, optimizer)
    return head, optimizer


def step(head, optimizer) -> None:
    """Take a step on the same global batch at every world size. Rank 0 has all of its rows."""
    alone = head.mesh is None or torch.distributed.get_rank() == 0
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(8, 4, generator=generator)[: 8 if alone else 0]
    labels = torch.randint(13, (8,), generator=generator)[: 8 if alone else 0]
    optimizer.zero_grad()
    head(features, labels).backward()
    optimizer.step()


def rows_of(head) -> dict[int, np.ndarray]:
    """The row of each class, with its bias as the last element."""
    return {
        int(class_id): np.append(row, bias)
        for block in head.class_rows()
        for class_id, row, bias in zip(block.class_ids, block.rows, block.bias, strict=True)
    }


def moments_of(head, optimizer) -> torch.Tensor:
    """The moments of the rows [n, dim], with the bias's moment as the last column."""
    of_rows, of_bias = (optimizer.state[p]["momentum_buffer"] for p in (head.weight, head.bias))
    return torch.cat([of_rows, of_bias[:, None]], dim=1)


def grown_on_a_rank():
    return {weighting: grown(weighting, rank_mesh()) for weighting in PARENTS}


def grown(weighting: str, mesh=None):
    head, optimizer = trained_head(weighting, mesh)
    before = rows_of(head)
    append_classes(head, PARENTS[weighting], optimizer=optimizer, seed=9, init_std=0.1)
    after = rows_of(head)
    moment = moments_of(head, optimizer).numpy().copy()
    step(head, optimizer)
    return before, after, moment, rows_of(head)


@pytest.fixture(scope="module")
def grown_on_ranks():
    return run_on_ranks(3, grown_on_a_rank)


@pytest.mark.parametrize("weighting", PARENTS)
def test_existing_rows_do_not_change_and_training_continues_identically_at_every_world_size(
    weighting, grown_on_ranks
):
    before, after, moment, later = grown(weighting)
    added = len(PARENTS[weighting])
    assert sorted(after) == list(range(13 + added))
    for class_id, row in before.items():
        np.testing.assert_allclose(after[class_id], row, atol=1e-6)
    assert np.abs(moment).sum() > 0
    ranks = [rank[weighting] for rank in grown_on_ranks]
    for index, want in ((1, after), (3, later)):
        got = {key: value for rank in ranks for key, value in rank[index].items()}
        assert sorted(got) == sorted(want)
        for class_id, row in want.items():
            np.testing.assert_allclose(got[class_id], row, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([rank[2] for rank in ranks]), moment, atol=1e-6)


def test_momentum_moves_with_its_rows():
    head, optimizer = trained_head("vtree")
    old = moments_of(head, optimizer)
    tree, moved = append_to_tree(head.tree, PARENTS["vtree"])
    append_classes(head, PARENTS["vtree"], optimizer=optimizer)
    new = moments_of(head, optimizer)
    torch.testing.assert_close(new[torch.from_numpy(moved)], old)
    assert len(new) == tree.num_nodes
    assert optimizer.param_groups[0]["params"] == [head.weight, head.bias]


def test_appended_classes_start_with_the_initial_bias_of_the_loss():
    for tree in (1000, label_tree("vtree", 13)):
        head = ClassHead(4, tree, make_loss("bce", 1000), init_std=0.0)
        before = head.num_classes
        append_classes(head, [-1, -1], init_std=0.0)
        rows = rows_of(head)
        start = head.loss.initial_bias(before + 2)
        assert rows[before][-1] == rows[before + 1][-1] == pytest.approx(start)


def bad_parent_on_one_rank():
    head = ClassHead(4, 13, make_loss("ce", 13), mesh=rank_mesh())
    bad = torch.distributed.get_rank() == 1
    try:
        append_classes(head, [99 if bad else -1])
    except ValueError as error:
        return str(error), head.num_classes


def test_an_invalid_parent_on_one_rank_raises_an_error_on_all_ranks_and_changes_nothing():
    good, bad = run_on_ranks(2, bad_parent_on_one_rank)
    assert "another rank failed to append" in good[0]
    assert "parent 99" in bad[0]
    assert good[1] == bad[1] == 13

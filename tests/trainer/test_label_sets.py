"""Steps on rows with sets of labels: every loss, mixed rows, micro-batches and ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.loading.batch import Batch, Mixed
from heads import LabelSets
from tests.heads.set_cases import SET_KINDS
from tests.host_reads import host_reads
from tests.ranks import run_on_ranks
from tests.trainer.test_task import gradients
from tests.trainer.training import each, images, started
from trainer.step import compute_gradients, take_step
from trainer.task import Task

ROWS = 11
# The first three rows have no labels: the first of three micro-batches in one process.
SETS = [[], [], [], [7, 12], [0], [], [3, 4, 5], [1], [12], [2, 7], [0, 3]]
SECOND = [[1], [], [2, 8], [7], [0, 12], [5], [], [1, 3], [4], [2], [6, 11]]
WEIGHTS = torch.tensor([1.0, 0.3, 0.6, 0.0, 0.5, 0.9, 0.2, 0.7, 1.0, 0.4, 0.1])


def batch_of_sets(begin: int, end: int, *, is_mixed: bool) -> Batch:
    """Return rows `begin` to `end` of noise images with the sets above."""
    sets, second = LabelSets.of(SETS[begin:end]), LabelSets.of(SECOND[begin:end])
    mixed = Mixed(second.labels, WEIGHTS[begin:end], second.offsets) if is_mixed else None
    return replace(images(begin, end), labels=sets.labels, offsets=sets.offsets, mixed=mixed)


def share_of_sets(task: Task, *, is_mixed: bool) -> Batch:
    """Return this rank's share of all rows."""
    rank, size = task.world.rank, task.world.size
    return batch_of_sets(ROWS * rank // size, ROWS * (rank + 1) // size, is_mixed=is_mixed)


def start(shards: Path, kind: str, micro_batches: int, **changes: Any) -> Task:
    task = started(
        shards,
        head__loss__kind=kind,
        backbone__batch_norm="frozen",
        train__global_batch=ROWS,
        train__micro_batches=micro_batches,
        **changes,
    )
    return task.train()


def found_on_a_rank(shards: Path, micro_batches: int) -> list[tuple[float, dict[str, np.ndarray]]]:
    """The loss and gradients of each loss, without and with mixed rows."""
    found = []
    for kind in SET_KINDS:
        for is_mixed in (False, True):
            task = start(shards, kind, micro_batches)
            batch = share_of_sets(task, is_mixed=is_mixed)
            found.append((float(compute_gradients(task, batch, step=1).loss), gradients(task)))
    return found


@pytest.fixture(scope="module")
def alone(glyphs: Path) -> list[tuple[float, dict[str, np.ndarray]]]:
    return found_on_a_rank(glyphs, 1)


def test_a_step_equals_the_head_on_all_rows(glyphs, alone):
    expected = iter(alone)
    for kind in SET_KINDS:
        for is_mixed in (False, True):
            task = start(glyphs, kind, 1)
            features = task.backbone(images(0, ROWS).inputs)
            if is_mixed:
                sets, weights = LabelSets.of(SETS + SECOND), torch.cat([WEIGHTS, 1 - WEIGHTS])
                loss = task.head(torch.cat([features, features]), sets, weights)
            else:
                loss = task.head(features, LabelSets.of(SETS))
            loss.backward()
            value, grads = next(expected)
            assert value == pytest.approx(loss.item(), rel=1e-5), kind
            for name, gradient in gradients(task).items():
                np.testing.assert_allclose(grads[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(1, 3), (2, 3)])
def test_ranks_and_micro_batches_do_not_change_the_gradients(
    num_ranks, micro_batches, glyphs, alone
):
    """One micro-batch consists of rows without labels."""
    for rank in run_on_ranks(num_ranks, found_on_a_rank, glyphs, micro_batches):
        for number, ((value, expected), (got_value, got)) in enumerate(
            zip(alone, rank, strict=True)
        ):
            kind = SET_KINDS[number // 2]
            assert got_value == pytest.approx(value, rel=1e-5), kind
            for name in expected.keys() - {"head.weight", "head.bias"}:
                np.testing.assert_allclose(
                    got[name], expected[name], rtol=1e-3, atol=1e-6, err_msg=f"{kind} {name}"
                )


def without_labels(shards: Path, kind: str) -> tuple[float, bool]:
    """Take the first step on rows without labels. Return its loss, and whether the gradient of the
    class rows is 0."""
    task = start(shards, kind, 2)
    batch = share_of_sets(task, is_mixed=False)
    empty = replace(batch, labels=batch.labels[:0], offsets=torch.zeros_like(batch.offsets))
    loss = compute_gradients(task, empty, step=1).loss
    found = float(loss), not task.head.weight.grad.any()
    take_step(task, batch, 1.0, step=2)  # with labels, which are now checked
    assert task.has_checked_inputs
    return found


def test_a_batch_without_labels_has_no_loss_unless_the_loss_learns_from_negatives(glyphs):
    kinds = ("ce", "decoupled_softmax", "batch_ce", "bce")
    for rank in run_on_ranks(2, each, without_labels, [(glyphs, kind) for kind in kinds]):
        *nothing, (loss, is_zero) = rank
        assert nothing == [(0.0, True)] * 3
        assert loss > 0
        assert not is_zero


def reads_of_a_step(shards: Path, kind: str) -> list[str]:
    """The reads from the device in a step that is not the first."""
    task = start(shards, kind, 1, train__synchronous=False)
    batch = share_of_sets(task, is_mixed=True)
    take_step(task, batch, 1.0, step=1)
    with host_reads(batch.tensors()) as reads:
        take_step(task, batch, 1.0, step=2)
    return [line.rpartition(":")[0] for line in reads]  # without the line number


def test_the_host_reads_only_the_exchanged_numbers_of_labels(glyphs):
    """They are on the CPU, so that the host does not wait for the device."""
    exchange = ["tensor at trainer/step.py", *["tolist at trainer/step.py"] * 2]
    cases = [(glyphs, "bce"), (glyphs, "decoupled_softmax")]
    assert run_on_ranks(2, each, reads_of_a_step, cases) == [[exchange] * 2] * 2

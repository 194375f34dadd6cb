"""The private names of DeepSpeed that kway uses still exist and still work as expected.

A failure here means that a new version of DeepSpeed has changed one of them. Check whether the new
version has a public function; otherwise adapt `trainer/strategies/private_deepspeed.py` and the
version cap in `pyproject.toml`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from heads.collectives import all_reduce_sum
from tests.ranks import run_on_ranks
from tests.trainer.training import started, take_steps
from trainer.strategies import private_deepspeed as private


def check_stages_1_and_3(glyphs: Path) -> None:
    check_stage_1(glyphs)
    check_stage_3(glyphs)


def check_stage_1(glyphs: Path) -> None:
    task, zero, weights = stepped(glyphs, stage=1)
    flats = dict(private.flat_pieces(zero, 1))
    numel = sum(flat.numel() for flat in flats.values())
    assert 2 * numel >= sum(weight.numel() for weight in weights)
    first = weights[0]
    private.link_moments(first, flats, task.strategy.optimizer.state)
    private.set_weight_or_moment(first, torch.full_like(first, 0.25), None)
    changed = torch.stack([flat.eq(0.25).sum() for flat in flats.values()]).sum()
    assert all_reduce_sum(changed, task.world.group) >= first.numel()
    task.strategy.close()


def check_stage_3(glyphs: Path) -> None:
    task, zero, weights = stepped(glyphs, stage=3)
    pieces = [private.weight_piece(weight) for weight in weights]
    flats = [flat for _, flat in private.flat_pieces(zero, 3)]
    assert sum(flat.numel() for flat in flats) >= sum(piece.numel() for piece in pieces)
    assert 2 * pieces[0].numel() >= task.strategy._shapes[next(iter(task.strategy._names))].numel()
    private.release_gathered_weights(zero)
    assert all(weight.numel() == 0 for weight in weights)
    task.strategy.close()


def stepped(glyphs: Path, *, stage: int) -> tuple[Any, Any, list[Any]]:
    """Return a task after one step, with DeepSpeed's optimizer and the weights."""
    task = started(glyphs, train__strategy={"kind": "deepspeed", "stage": stage})
    take_steps(task, 1)
    return task, task.strategy._zero, list(task.strategy._names.values())


def test_each_private_name_of_deepspeed_exists_and_works_as_expected(glyphs: Path) -> None:
    run_on_ranks(2, check_stages_1_and_3, glyphs)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda: private.disable_shared_memory_collectives(deepspeed.utils), "ops"),
        (lambda: private.reduced_gradients(object()), "averaged_gradients"),
        (lambda: private.flat_pieces(object(), 1), "single_partition_of_fp32_groups"),
        (lambda: private.flat_pieces(object(), 3), "fp32_partitioned_groups_flat"),
        (lambda: private.weight_piece(torch.nn.Parameter()), "ds_tensor"),
        (lambda: private.release_gathered_weights(object()), "_partition_all_parameters"),
        (lambda: private.link_moments(torch.nn.Parameter(), {}, {}), "_hp_mapping"),
    ],
)
def test_the_error_for_an_unsupported_deepspeed_contains_its_version(
    call: Callable[[], object], missing: str
) -> None:
    message = rf"DeepSpeed {deepspeed.__version__} .* has no {missing}\): install the version in"
    with pytest.raises(RuntimeError, match=message):
        call()

"""The exchange before each step: signals, bad samples and busy times of all ranks."""

from datetime import timedelta

import pytest
import torch

import trainer.world
from data.loading.batch import Batch
from data.loading.substitute import Substitute
from tests.ranks import rank_world, run_on_ranks
from trainer.steps.agreement import Agreed, agree
from trainer.world import Grid, World


def agreed_on(least_ranks_of_grid: int) -> tuple[bool, str | None, list[int], list[float]]:
    trainer.world._LEAST_RANKS_OF_GRID = least_ranks_of_grid
    world = rank_world()
    grid = Grid.create(world.size, timedelta(seconds=60))
    world = World(world.rank, world.size, world.rank, world.size, world.device, world.mesh, grid)
    substitutes = [Substitute(10 * world.rank, 0, "damaged")] if world.rank % 2 else []
    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch({}, empty, empty, substitutes=tuple(substitutes))
    stop = "SIGTERM" if world.rank == 2 else None
    found = agree(world, stop=stop, batch=batch, busy_seconds=float(world.rank))
    return grid is not None, found.stop, found.bad, found.busy_seconds


@pytest.mark.parametrize(("least", "has_grid"), [(16, False), (4, True)])
def test_all_ranks_agree_with_a_ring_and_with_a_grid(least: int, has_grid: bool) -> None:
    for found in run_on_ranks(4, agreed_on, least):
        assert found == (has_grid, "SIGTERM", [10, 30], [0.0, 1.0, 2.0, 3.0])


def test_a_prime_number_of_ranks_has_no_grid() -> None:
    assert Grid.create(17, timedelta(seconds=1)) is None


def test_one_rank_agrees_with_itself() -> None:
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    assert agree(world, stop=None) == Agreed(None, [], [0.0])

"""Exchanges stop signals, replaced samples and busy times between all ranks once per step."""

from dataclasses import dataclass

import torch

from data.loading.batch import Batch
from heads.collectives import all_gather_rows
from trainer.process.signals import STOP_SIGNALS
from trainer.world import World

_NAMES = (None, *(number.name for number in STOP_SIGNALS))


@dataclass(frozen=True)
class Agreed:
    """The result of the exchange, the same on every rank.

    `stop` is the name of the stop signal, if any rank received one. `bad` contains the indices of
    the bad samples that the ranks replaced, and `busy_seconds` contains one number per rank.
    """

    stop: str | None
    bad: list[int]
    busy_seconds: list[float]


def agree(
    world: World, *, stop: str | None, batch: Batch | None = None, busy_seconds: float = 0.0
) -> Agreed:
    """Share this rank's values with all ranks (collective). Uses CPU tensors and gloo, so it does
    not synchronize with the device."""
    mine = [] if batch is None else [substitute.index for substitute in batch.substitutes]
    numbers = [_NAMES.index(stop), len(mine), busy_seconds]
    parts = world.all_gather_small(torch.tensor(numbers, dtype=torch.float64))
    stops, counts, busy = torch.stack(parts).T.tolist()
    bad: list[int] = []
    if any(counts):
        rows = torch.tensor(mine, dtype=torch.int64)
        bad = all_gather_rows(rows, [int(count) for count in counts], world.group).tolist()
    return Agreed(_NAMES[int(max(stops))], bad, busy)

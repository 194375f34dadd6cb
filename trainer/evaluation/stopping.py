"""Lets all ranks stop an evaluation together.

Ranks have work in different numbers of pieces; the question is asked equally often on all of them.
"""

from collections.abc import Callable

import torch

from heads.collectives import all_reduce_max
from trainer.world import World

ShouldStop = Callable[[], bool]


class EvaluationStopped(Exception):  # noqa: N818  nothing went wrong
    """All ranks agreed to stop in the middle of an evaluation: it has no result."""


def never_stop() -> bool:
    """Goes on."""
    return False


class StopChecks:
    """As many turns on every rank as the rank with most has pieces (collective).

    `take` before a piece, `rest` after the last one; each raises EvaluationStopped on all ranks
    once `should_stop`, on which the ranks agree, is true.
    """

    def __init__(self, num_pieces: int, should_stop: ShouldStop, world: World) -> None:
        count = torch.tensor(num_pieces, device=world.device)
        self._left = int(all_reduce_max(count, world.group))
        self._should_stop = should_stop

    def take(self) -> None:
        """The turn before a piece of work."""
        assert self._left, "more pieces than were announced"
        self._left -= 1
        if self._should_stop():
            raise EvaluationStopped("the evaluation was stopped before its end")

    def rest(self) -> None:
        """The turns that other ranks still have."""
        while self._left:
            self.take()

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
    """For evaluations that nothing stops."""
    return False


class StopChecks:
    """Calls `should_stop` equally often on every rank: once per piece of the rank that has the most
    pieces (collective).

    `check` before each piece, `check_remaining` after the last one; both raise EvaluationStopped on
    all ranks once `should_stop`, on which the ranks agree, is true.
    """

    def __init__(self, num_pieces: int, should_stop: ShouldStop, world: World) -> None:
        count = torch.tensor(num_pieces, device=world.device)
        self._num_left = int(all_reduce_max(count, world.group))
        self._should_stop = should_stop

    def check(self) -> None:
        """The check before a piece of work."""
        assert self._num_left, "more pieces than were announced"
        self._num_left -= 1
        if self._should_stop():
            raise EvaluationStopped("the evaluation was stopped before its end")

    def check_remaining(self) -> None:
        """The checks that other ranks still make."""
        while self._num_left:
            self.check()

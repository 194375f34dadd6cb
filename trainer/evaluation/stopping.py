"""Stops an evaluation on all ranks at the same point.

Ranks may have different numbers of pieces of work, but the check is collective. Every rank
therefore makes the same number of checks.
"""

from collections.abc import Callable

import torch

from heads.collectives import all_reduce_max
from trainer.world import World

ShouldStop = Callable[[], bool]


class EvaluationStopped(Exception):  # noqa: N818  not an error
    """All ranks agreed to stop an evaluation before it produced a result."""


def never_stop() -> bool:
    """The `should_stop` callback of evaluations that cannot be stopped. Returns False."""
    return False


class StopChecks:
    """Calls `should_stop` the same number of times on every rank: once per piece of the rank with
    the most pieces (collective).

    Call `check` before each piece and `check_remaining` after the last one. Both raise
    EvaluationStopped on all ranks once `should_stop` returns true. It must do so on all ranks at
    the same check.
    """

    def __init__(self, num_pieces: int, should_stop: ShouldStop, world: World) -> None:
        count = torch.tensor(num_pieces, device=world.device)
        self._num_left = int(all_reduce_max(count, world.group))
        self._should_stop = should_stop

    def check(self) -> None:
        """Check before a piece of work."""
        assert self._num_left, "more pieces than `num_pieces`"
        self._num_left -= 1
        if self._should_stop():
            raise EvaluationStopped("the evaluation was stopped before it finished")

    def check_remaining(self) -> None:
        """Make the remaining checks, to match the ranks with more pieces."""
        while self._num_left:
            self.check()

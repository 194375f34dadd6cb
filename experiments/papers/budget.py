"""The time budget of an experiment in minutes, which determines how many rounds it runs.

The time that a job took is stored with its result. A run that is resumed, or that finds all results
stored, therefore makes the same decisions as an uninterrupted one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Budget:
    """A budget of `minutes` for an experiment that is designed for `designed` minutes.

    If it is 0, the experiment is a toy run that only shows that the code works. With fewer minutes
    than `designed`, all sizes shrink by the same factor (`size`); with more, there are more rounds
    of seeds (`rounds`). `first_seed` is the first of the seeds whose runs are compared.
    """

    minutes: float
    designed: float
    # The limit for the rounds, which includes minutes that earlier experiments did not use.
    allowed: float = -1.0
    first_seed: int = 0
    spent: float = field(default=0.0, init=False)
    largest_round: float = field(default=0.0, init=False)

    @property
    def is_toy(self) -> bool:
        return self.minutes == 0

    @property
    def effort(self) -> float:
        """The fraction of the designed sizes to run, at most 1."""
        return min(1.0, self.minutes / self.designed)

    def size(self, designed: int, *, least: int = 1) -> int:
        """Return the number of steps, samples or draws at this budget."""
        return max(least, round(designed * self.effort))

    def rounds(self, *, at_least: int = 3, at_most: int = 10) -> Iterator[int]:
        """Yield 0, 1, ... while another round fits into the budget.

        A round is assumed to take as long as the longest one so far.
        """
        for number in range(at_most):
            before = self.spent
            if number >= (2 if self.is_toy else at_least) and not self._fits():
                return
            yield number
            self.largest_round = max(self.largest_round, self.spent - before)

    def _fits(self) -> bool:
        return self.spent + self.largest_round <= max(self.allowed, self.minutes)

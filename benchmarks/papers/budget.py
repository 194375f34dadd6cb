"""The budget of an experiment: minutes of this machine, of which its rounds take what there is.

Time is what jobs took, as it was kept with their results: a run that was cut off and goes on, and
one that finds all measured, decide as an uninterrupted one does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Budget:
    """`minutes` for an experiment that is made for `designed`; None: the published sizes; 0: a toy,
    which shows that everything runs, and nothing else.

    With less than it is made for, an experiment's sizes shrink alike (`size`); with more there are
    more rounds, which is to say seeds (`rounds`).
    """

    minutes: float | None
    designed: float
    # For its rounds it may take what others left over, too.
    allowed: float | None = None
    spent: float = field(default=0.0, init=False)
    largest_round: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.allowed is None:
            self.allowed = self.minutes

    @property
    def is_full(self) -> bool:
        return self.minutes is None

    @property
    def is_toy(self) -> bool:
        return self.minutes == 0

    @property
    def effort(self) -> float:
        """Share of the sizes that the experiment is made for, at most 1."""
        return 1.0 if self.minutes is None else min(1.0, self.minutes / self.designed)

    def size(self, designed: int, *, full: int, least: int = 1) -> int:
        """A number of steps, samples or draws at this budget."""
        return full if self.is_full else max(least, round(designed * self.effort))

    def rounds(self, *, at_least: int = 3, at_most: int = 10) -> Iterator[int]:
        """0, 1, ...: another while it fits into the minutes, judged by the longest so far; without
        minutes, `at_least`."""
        for number in range(at_most):
            before = self.spent
            if number >= (2 if self.is_toy else at_least) and not self._fits():
                return
            yield number
            self.largest_round = max(self.largest_round, self.spent - before)

    def _fits(self) -> bool:
        return self.allowed is not None and self.spent + self.largest_round <= self.allowed

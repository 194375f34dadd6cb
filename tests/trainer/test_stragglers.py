"""Detection of slow ranks from their busy seconds."""

import random
import statistics

from trainer.faults import Stragglers


def _filled(*steps: list[float], window: int) -> Stragglers:
    stragglers = Stragglers(len(steps[0]), window=window)
    for step in steps:
        stragglers.add(step)
    return stragglers


def test_a_rank_that_takes_much_longer_than_the_median_of_the_others_is_slow() -> None:
    assert _filled([1.0, 1.1, 2.2, 0.9], window=1).slow_ranks() == {2: 2.2}


def test_one_long_step_does_not_make_a_rank_slow() -> None:
    steps = [[1.0, 1.0]] * 4 + [[1.0, 50.0]]
    assert _filled(*steps, window=5).slow_ranks() == {}


def test_a_rank_is_compared_with_the_median_of_all_others() -> None:
    numbers = random.Random(0)
    for size in [2, 3, 4, 5, 6, 7] * 20:
        busy = [float(numbers.choice([1, 2, 3, 5, 8, 13, 21])) for _ in range(size)]
        others = [statistics.median(busy[:rank] + busy[rank + 1 :]) for rank in range(size)]
        expected = {
            rank: mine / other
            for rank, (mine, other) in enumerate(zip(busy, others, strict=True))
            if mine > 1.5 * other
        }
        assert _filled(busy, window=1).slow_ranks() == expected


def test_the_notice_gives_the_slowest_rank_and_is_rate_limited() -> None:
    stragglers = _filled([1.0, 1.0, 1.0, 2.0, 3.0], window=1)
    line = stragglers.notice(now=0.0)
    assert line is not None
    assert line.startswith(
        "rank 4 is slow (and 1 more): over 1 steps, it worked 3 s per step, 3 times as long as "
    )
    assert stragglers.notice(now=1799.0) is None
    assert stragglers.notice(now=1800.0) == line

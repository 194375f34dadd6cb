"""A small run of `tests/serving/kills.py`, which sends the hits to an unreliable receiver, too."""

import pytest

from tests.serving import kills


@pytest.mark.slow
def test_random_kills_lose_no_hit_and_duplicates_have_the_same_id() -> None:
    outcome = kills.run(num_watches=24, num_frames=100, num_kills=10)
    assert outcome.problems == []
    assert len(outcome.kills) == 10
    assert set(outcome.kills) == {*kills.KINDS}
    assert outcome.delivered >= outcome.hits >= 24 * 100
    assert outcome.failures > 0

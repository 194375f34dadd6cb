"""Runs of `tests/serving/swaps.py`."""

import pytest

from tests.serving import swaps

_BACKBONE_MIB = 150


@pytest.mark.slow
@pytest.mark.parametrize("no_ray", [True, False])
def test_20000_requests_during_swaps_are_answered_by_the_version_which_they_name(
    no_ray: bool,
) -> None:
    outcome = swaps.run(20_000, 10, backbone_mib=_BACKBONE_MIB, no_ray=no_ray)
    assert outcome.problems == []
    assert outcome.answers.total() >= 20_000
    assert len(outcome.answers) == 2
    assert (outcome.swaps, outcome.damaged) == (10, 10)
    # No replica has kept an old version.
    assert outcome.resident_mib[-1] - outcome.resident_mib[0] < _BACKBONE_MIB


@pytest.mark.slow
def test_replicas_that_are_killed_during_swaps_serve_the_new_version() -> None:
    outcome = swaps.run(2000, 4, num_kills=3)
    assert outcome.problems == []
    assert (outcome.swaps, outcome.kills) == (4, 3)
    assert len(outcome.answers) == 2

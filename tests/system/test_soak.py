"""A seeded sample of the soak: runs that are struck end with the bits of one that is not."""

import signal

import pytest

from tests.soak.disturbed import Plan, draw, finish, lay, strike


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_ends_with_the_same_bits(tmp_path):
    course = lay(tmp_path / "course", num_steps=90)
    plans = [
        Plan(signal.SIGKILL, "the launcher", at_start=False, wait=0.3),
        Plan(signal.SIGTERM, "a rank", at_start=False, wait=0.2),
    ]
    for index, plan in enumerate(plans):
        trial = strike(course, plan, index)
        assert trial.sound, trial
    whole = finish(course)
    assert whole.sound, whole


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_struck_at_random_instants(number, tmp_path):
    course = lay(tmp_path / "course", num_steps=240)
    trials = [strike(course, plan, n) for n, plan in enumerate(draw(number, 4, seed=1))]
    assert all(trial.sound for trial in [*trials, finish(course)]), trials

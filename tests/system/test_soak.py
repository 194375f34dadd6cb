"""A short soak test with fixed seeds: disturbed runs are bit-identical to an undisturbed run."""

import signal

import pytest

from tests.soak.disturbed import Plan, disturb, draw, finish, prepare


@pytest.mark.slow
def test_a_run_that_was_killed_and_stopped_is_bit_identical(tmp_path):
    experiment = prepare(tmp_path / "experiment", num_steps=90)
    plans = [
        Plan(signal.SIGKILL, "the launcher", at_start=False, wait=0.3),
        Plan(signal.SIGTERM, "a rank", at_start=False, wait=0.2),
    ]
    for index, plan in enumerate(plans):
        trial = disturb(experiment, plan, index)
        assert trial.passed, trial
    result = finish(experiment)
    assert result.passed, result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_run_disturbed_at_random_times_is_bit_identical(number, tmp_path):
    experiment = prepare(tmp_path / "experiment", num_steps=240)
    trials = [disturb(experiment, plan, n) for n, plan in enumerate(draw(number, 4, seed=1))]
    assert all(trial.passed for trial in [*trials, finish(experiment)]), trials

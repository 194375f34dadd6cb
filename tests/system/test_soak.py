"""Runs that are killed and stopped are bit-identical to undisturbed runs. `make soak` disturbs runs
at random times.
"""

import signal

import pytest

from tests.soak.disturbed import Plan, disturb, finish, prepare


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
def test_a_run_that_was_killed_and_stopped_is_bit_identical(deferred, tmp_path):
    experiment = prepare(tmp_path / "experiment", num_steps=90, deferred=deferred)
    plans = [
        Plan(signal.SIGKILL, "the launcher", at_start=False, wait=0.3),
        Plan(signal.SIGKILL, "a rank", at_start=False, wait=0.2),
        Plan(signal.SIGTERM, "a rank", at_start=False, wait=0.2),
    ]
    for index, plan in enumerate(plans):
        trial = disturb(experiment, plan, index)
        assert trial.passed, trial
    result = finish(experiment)
    assert result.passed, result

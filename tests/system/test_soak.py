"""A short soak test with fixed seeds: disturbed runs are bit-identical to an undisturbed run, and
faults in a step have the same results whether or not the host waits for each step.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.soak.disturbed import Plan, disturb, draw, finish, prepare
from tests.soak.faults import Fault, compare
from tests.system.processes import write_recipe
from tests.system.runs import last_step, launched, losses, samples_by_step


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
def test_a_run_that_was_killed_and_stopped_is_bit_identical(deferred, tmp_path):
    experiment = prepare(tmp_path / "experiment", num_steps=90, deferred=deferred)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [Fault.nan(rank=1, step=3), Fault.overflow(rank=1, step=3)],
    ids=lambda fault: fault.name,
)
def test_a_fault_has_the_same_result_in_deferred_steps(fault: Fault, tmp_path: Path) -> None:
    """In the default suite, `tests/trainer/test_deferred.py` causes these faults in single
    steps."""
    trial = compare(fault, tmp_path / "runs")
    assert trial.passed, trial


@pytest.mark.slow
def test_a_deferred_run_that_is_killed_and_then_stopped_records_each_step_once(glyphs, tmp_path):
    recipe = write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "unused",
            train__duration={"steps": 100_000},
            train__synchronous=False,
            checkpoint={"every": {"steps": 3}},
            telemetry={"log_every": 1, "sample_ids": True},
            data__workers=1,
        ),
    )
    run = tmp_path / "run"
    with launched(recipe, run) as training:
        training.wait_for_step(5)
        os.kill(training.ranks[1], signal.SIGKILL)
        assert training.end() == 128 + signal.SIGKILL
        assert "error: rank 1 was killed by SIGKILL" in training.output
    with launched(recipe, run) as training:
        resumed = last_step(run)
        training.wait_for(lambda: last_step(run) > resumed, "a new step")
        os.kill(training.ranks[0], signal.SIGTERM)
        assert training.end() == 75, training.output
    steps = list(range(1, last_step(run) + 1))
    assert sorted(losses(run)) == steps
    samples = samples_by_step(run)
    assert sorted(samples) == steps
    assert all(len(samples[step]) == 12 for step in steps)
    saved = max(path.name for path in (run / "checkpoints").iterdir())
    assert saved == f"step-{last_step(run):08d}"

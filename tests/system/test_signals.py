"""Signals that ask a run to stop: it saves, its exit code says so, and nothing of it is left."""

import os
import signal

import pytest

from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import descendants, final_tensors, last_step, launched, left_after
from trainer.signals import Preempted, StopSignals


@pytest.fixture
def endless(glyphs, tmp_path):
    """A recipe that never comes to its end, nor to a checkpoint but when it is asked to stop."""
    return write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "unused",
            train__duration={"steps": 100_000},
            checkpoint={"every": {"steps": 90_000}},
            telemetry={"log_every": 1},
            data__workers=1,
        ),
    )


@pytest.mark.parametrize(
    ("number", "target", "code"),
    [
        (signal.SIGTERM, "launcher", 75),
        (signal.SIGINT, "launcher", 130),
        (signal.SIGUSR1, "a rank", 75),
        (signal.SIGTERM, "a rank's group", 75),  # as torchrun does, loader processes and all
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_run_that_is_asked_to_stop_saves_its_last_step(number, target, code, endless, tmp_path):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for_step(2)
        family = descendants(run.process.pid)
        assert len(family) == 4  # two ranks, each with a loader process
        if target == "a rank's group":
            os.killpg(run.ranks[1], number)
        else:
            os.kill(run.process.pid if target == "launcher" else run.ranks[1], number)
        assert run.end() == code, run.words
        assert run.words.count("stopped by SIG") == 1
        assert "error" not in run.words
        assert left_after(family, 3) == []
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{last_step(tmp_path / 'run'):08d}"]
    assert final_tensors(tmp_path / "run")


def test_a_signal_while_the_ranks_still_import_means_preempted(endless, tmp_path):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for(lambda: len(run.ranks) == 2, "ranks")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 75, run.words
        assert run.words == ""
    with launched(endless, tmp_path / "run") as run:
        run.wait_for(lambda: len(run.ranks) == 2, "ranks")
        os.kill(run.ranks[0], signal.SIGTERM)
        assert run.end() == 75, run.words
        assert run.words == ""
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_ends_at_once_and_ranks_that_do_not_save_in_time_are_killed(
    endless, tmp_path
):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for_step(2)
        family = descendants(run.process.pid)
        os.kill(run.ranks[1], signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        while run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
        assert run.process.returncode == 130, run.words
        assert left_after(family, 3) == []
    with launched(endless, tmp_path / "other", "--shutdown-timeout", "1") as run:
        run.wait_for_step(2)
        os.kill(run.ranks[1], signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGKILL
        assert "not all ranks ended within 1 s of SIGTERM and they were killed" in run.words


def test_signals_are_noted_and_a_second_ctrl_c_is_an_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == "SIGUSR1"
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [Preempted(name).exit_code for name in ("SIGTERM", "SIGINT")] == [75, 130]

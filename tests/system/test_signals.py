"""A run that is stopped by a signal saves a checkpoint and exits with the right code."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.dispositions import default_signals, ignored, is_ignored
from tests.process_tree import children, descendants, left_after
from tests.system.processes import KWAY, ROOT, environment
from tests.system.runs import (
    Launched,
    final_tensors,
    last_step,
    launched,
)
from tests.waiting import wait_until
from trainer.process.signals import Preempted, StopSignals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "target", "code"),
    [
        (signal.SIGTERM, "launcher", 75),
        (signal.SIGINT, "launcher", 130),
        (signal.SIGHUP, "launcher", 75),
        # torchrun sends its signals to the whole process group, which includes the loader
        # processes.
        (signal.SIGTERM, "a rank's group", 75),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@default_signals()
def test_a_signal_makes_a_run_save_its_last_step_and_stop(number, target, code, endless, tmp_path):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for_step(2)
        family = descendants(run.process.pid)
        assert len(family) == 4  # two ranks, each with a loader process
        if target == "a rank's group":
            os.killpg(run.ranks[1], number)
        else:
            os.kill(run.process.pid if target == "launcher" else run.ranks[1], number)
        assert run.end() == code, run.output
        reported = "SIGTERM" if number == signal.SIGINT else number.name
        assert run.output.count(f"stopped by {reported}") == 1
        assert "error" not in run.output
        assert left_after(family, 30) == []
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{last_step(tmp_path / 'run'):08d}"]
    assert final_tensors(tmp_path / "run")


@pytest.mark.parametrize(
    "closed", ["| head -n 1 >/dev/null", pytest.param(">&-", marks=pytest.mark.slow)]
)
def test_a_run_continues_after_the_reader_of_its_output_exits_and_stops_after_a_signal_to_a_rank(
    closed, endless, tmp_path
):
    """For example, `| tee` exits when the terminal closes, and a service may have no standard
    output.
    """
    folder = tmp_path / "run"
    command = " ".join([*KWAY, "train", str(endless), f"run={folder}", "--nproc", "2"])
    shell = ["bash", "-c", f"set -o pipefail; {command} {closed}"]
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            shell, cwd=ROOT, env=environment(), stderr=log, start_new_session=True
        )
    running = Launched(process, tmp_path / "log", folder)
    try:
        running.wait_for(lambda: last_step(folder) >= 4, "step 4")
        family = descendants(process.pid)
        launcher = next(pid for pid in family if len(children(pid)) == 2)
        os.kill(children(launcher)[1], signal.SIGUSR1)
        assert running.end() == 75, running.output
        assert left_after(family, 30) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    assert saved == [f"step-{last_step(folder):08d}"]
    assert running.output.count("stopped by SIGUSR1") == 1
    assert "error" not in running.output
    assert final_tensors(folder)
    assert "Traceback" not in running.output


def test_a_launcher_stopped_while_importing_torch_exits_as_preempted(endless, tmp_path):
    with launched(endless, tmp_path / "run") as run:
        maps = Path(f"/proc/{run.process.pid}/maps")
        run.wait_for(lambda: "libtorch" in maps.read_text(), "torch")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 75, run.output
        assert run.output == ""


def test_a_launcher_stopped_while_its_ranks_are_importing_exits_as_preempted(endless, tmp_path):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for(lambda: len(run.ranks) == 2, "ranks")
        os.kill(run.ranks[0], signal.SIGTERM)
        assert run.end() == 75, run.output
        assert run.output == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@default_signals()
def test_a_second_ctrl_c_exits_immediately_and_ranks_are_killed_after_the_timeout(
    endless, tmp_path
):
    with launched(endless, tmp_path / "run") as run:
        run.wait_for_step(2)
        family = descendants(run.process.pid)
        os.kill(run.ranks[1], signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        wait_until(lambda: run.process.poll() is not None or run.process.send_signal(signal.SIGINT))
        assert run.process.returncode == 130, run.output
        assert left_after(family, 30) == []
    with launched(endless, tmp_path / "other", "--shutdown-timeout", "1") as run:
        run.wait_for_step(2)
        os.kill(run.ranks[1], signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGKILL
        assert "some ranks did not exit within 1 s of SIGTERM" in run.output


@ignored(signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
def test_a_run_ignores_the_signals_that_its_parent_ignored_except_sigterm(endless, tmp_path):
    with launched(endless, tmp_path / "run", num=1) as run:
        run.wait_for_step(1)
        for pid in (run.process.pid, *run.ranks):
            assert is_ignored(pid, signal.SIGINT)
            assert is_ignored(pid, signal.SIGHUP)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 75, run.output


@default_signals()
def test_stop_signals_are_recorded_and_a_second_ctrl_c_raises():
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

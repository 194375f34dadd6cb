"""Lost ranks and launchers: the processes that exit, the messages, and the restarts."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import ROOT, environment, kway, write_recipe
from tests.system.runs import descendants, kill, launched, left_after, losses
from trainer.__main__ import main
from trainer.world import is_lost_rank

TAR = "train-000000.tar"


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_ranks_exit_with_a_killed_launcher(num_processes, endless, tmp_path, capsys):
    with launched(endless, tmp_path / "run", num=num_processes) as training:
        training.wait_for_step(2)
        # A second run in the same folder is rejected and does not affect the first.
        second = [str(endless), f"run={tmp_path / 'run'}", "train.duration.steps=1"]
        assert main(second) == 2
        assert "is being trained by another process" in capsys.readouterr().err
        assert training.process.poll() is None
        family = descendants(training.process.pid)
        assert len(family) == 2 * num_processes  # a rank has a loader process
        kill(training.process)
        assert left_after(family, 3) == []


def test_a_rank_without_its_launcher_does_not_start(endless):
    command = [sys.executable, "-m", "trainer", "--launcher", "1", str(endless)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_rank_is_reported(endless, tmp_path):
    with launched(endless, tmp_path / "run") as training:
        training.wait_for_step(2)
        os.kill(training.ranks[1], signal.SIGKILL)
        assert training.end() == 128 + signal.SIGKILL
        assert "error: rank 1 was killed by SIGKILL (out of memory?)" in training.output
        assert "Traceback" not in training.output


def test_ranks_restart_after_a_transient_error_and_a_kill_and_log_every_step_once(
    glyphs, tmp_path, monkeypatch
):
    fault = {"call": "pread", "path": TAR, "errno": "EIO", "rank": 1, "restart": 0}
    monkeypatch.setenv("KWAY_TEST_FAULT", json.dumps(fault))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/faults"))
    recipe = write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "unused",
            train__duration={"steps": 30},
            checkpoint={"every": {"steps": 3}},
            telemetry={"log_every": 1},
            data__workers=1,
        ),
    )
    with launched(recipe, tmp_path / "run", "--max-restarts", "3") as training:
        training.wait_for_step(4)
        os.kill(training.ranks[0], signal.SIGKILL)
        assert training.end() == 0, training.output
    output = training.output
    assert f"{TAR}: [Errno 5] Input/output error; attempt 8 of 8" in output
    assert re.search(rf"error: rank 1: .*{TAR}: \[Errno 5\].*\(8 attempts\)", output)
    assert "restart 1 of 3" in output
    assert "rank 0 was killed by SIGKILL (out of memory?); restart 2 of 3" in output
    assert "Traceback" not in output
    assert sorted(losses(tmp_path / "run")) == list(range(1, 31))


def test_an_input_error_of_the_ranks_is_printed_once_and_not_retried(endless, tmp_path):
    finished = kway(
        "train",
        endless,
        f"run={tmp_path / 'run'}",
        "head.num_classes=7",
        "--nproc",
        "2",
        "--max-restarts",
        "3",
    )
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("head.num_classes is 7, but the shards have 13 classes") == 1
    assert "Traceback" not in finished.stderr
    assert "restart" not in finished.stderr


def test_fewer_ranks_than_required_do_not_train(endless, tmp_path, capsys):
    assert main(["--world-size", "2", str(endless), f"run={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: the rendezvous ended with world size 1, but --world-size is 2: "
    )
    assert error.count("\n") == 1
    assert main(["--world-size", "two", str(endless)]) == 2
    assert "--world-size is two, but it must be" in capsys.readouterr().err
    assert main(["--world-size", "2:4", str(endless), f"run={tmp_path / 'run'}"]) == 2
    assert "has 1 ranks, but --world-size is 2:4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def exchange() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def exchange_with_a_dead_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as lost:
        exchange()
    assert is_lost_rank(lost.value)
    later = OSError("a checkpoint could not be written")
    later.__context__ = lost.value
    assert is_lost_rank(later)


def test_the_exit_of_a_peer_is_detected_from_the_gloo_error():
    # An error of rank 0 would be raised first.
    with pytest.raises(RankError, match="rank 1 died"):
        run_on_ranks(2, exchange_with_a_dead_rank)
    assert not is_lost_rank(RuntimeError("shapes do not match"))
    assert not is_lost_rank(ConnectionResetError("of a shard's server"))

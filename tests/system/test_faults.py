"""Lost ranks and launchers: the processes that exit, and the messages."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.process_tree import descendants, left_after
from tests.ranks import RankError, run_on_ranks
from tests.system.processes import ROOT, environment
from tests.system.runs import kill, launched
from trainer.__main__ import main
from trainer.world import is_lost_rank


def test_all_ranks_exit_if_their_launcher_is_killed(endless, tmp_path, capsys):
    with launched(endless, tmp_path / "run") as training:
        training.wait_for_step(2)
        # A second run in the same folder waits, fails and does not affect the first.
        second = [str(endless), f"run={tmp_path / 'run'}", "train.timeout_seconds=4"]
        assert main(second) == 1
        assert "is being trained by another process" in capsys.readouterr().err
        assert training.process.poll() is None
        family = descendants(training.process.pid)
        assert len(family) == 4  # a rank has a loader process
        kill(training.process)
        assert left_after(family, 30) == []


def test_a_rank_without_its_launcher_does_not_start(endless):
    command = [sys.executable, "-m", "trainer", "--launcher", "1", str(endless)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_rank_is_reported(endless, tmp_path):
    with launched(endless, tmp_path / "run") as training:
        training.wait_for_step(2)
        os.kill(training.ranks[1], signal.SIGKILL)
        assert training.end() == 128 + signal.SIGKILL
        assert "error: rank 1 was killed by SIGKILL (out of memory?)" in training.output
        assert "Traceback" not in training.output


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
    assert "world size 1, but --world-size is 2:4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def exchange(times: int) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(1))


def exchange_with_a_dead_rank() -> None:
    if dist.get_rank() == 1:
        exchange(1)  # after this, rank 0 is connected
        os._exit(0)
    with pytest.raises(RuntimeError) as lost:
        exchange(4)
    assert is_lost_rank(lost.value)
    later = OSError("a checkpoint could not be written")
    later.__context__ = lost.value
    assert is_lost_rank(later)


def test_the_exit_of_a_peer_is_detected_from_the_gloo_error():
    # An error on rank 0 would be raised first.
    with pytest.raises(RankError, match="rank 1 died"):
        run_on_ranks(2, exchange_with_a_dead_rank)
    assert not is_lost_rank(RuntimeError("shapes do not match"))
    assert not is_lost_rank(ConnectionResetError("of a shard's server"))

"""Lost ranks and launchers: the processes that exit, and the messages."""

import signal
import subprocess
import sys

import torch.distributed as dist

from tests.process_tree import descendants, left_after
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


def test_an_error_that_a_lost_rank_has_caused_is_distinguished_from_others():
    """The errors of gloo itself are in tests/trainer/test_agreement.py."""
    later = OSError("a checkpoint could not be written")
    later.__context__ = dist.DistNetworkError("the store does not respond")
    assert is_lost_rank(later)
    assert not is_lost_rank(RuntimeError("shapes do not match"))
    assert not is_lost_rank(ConnectionResetError("of a shard's server"))

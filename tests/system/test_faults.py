"""Ranks and launchers that die: who goes along, what is said, and what is tried again."""

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
def test_nothing_outlives_a_killed_launcher(num_processes, endless, tmp_path, capsys):
    with launched(endless, tmp_path / "run", num=num_processes) as training:
        training.wait_for_step(2)
        # A second one in the same folder is refused and does no harm.
        second = [str(endless), f"run={tmp_path / 'run'}", "train.duration.steps=1"]
        assert main(second) == 2
        assert "is being trained by another process" in capsys.readouterr().err
        assert training.process.poll() is None
        family = descendants(training.process.pid)
        assert len(family) == 2 * num_processes  # a rank has a loader process
        kill(training.process)
        assert left_after(family, 3) == []


def test_a_rank_whose_launcher_is_gone_already_does_not_start(endless):
    command = [sys.executable, "-m", "trainer", "--launcher", "1", str(endless)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_rank_is_named(endless, tmp_path):
    with launched(endless, tmp_path / "run") as training:
        training.wait_for_step(2)
        os.kill(training.ranks[1], signal.SIGKILL)
        assert training.end() == 128 + signal.SIGKILL
        assert "error: rank 1 was killed by SIGKILL (out of memory?)" in training.words
        assert "Traceback" not in training.words


def test_ranks_restart_after_a_transient_error_and_a_kill_and_every_step_is_made_once(
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
        assert training.end() == 0, training.words
    words = training.words
    assert f"{TAR}: [Errno 5] Input/output error; attempt 8 of 8" in words
    assert re.search(rf"error: rank 1: .*{TAR}: \[Errno 5\].*\(8 attempts\)", words)
    assert "restart 1 of 3" in words
    assert "rank 0 was killed by SIGKILL (out of memory?); restart 2 of 3" in words
    assert "Traceback" not in words
    assert sorted(losses(tmp_path / "run")) == list(range(1, 31))


def test_a_mistake_that_only_the_ranks_see_is_one_line_and_is_not_tried_again(endless, tmp_path):
    answer = kway(
        "train",
        endless,
        f"run={tmp_path / 'run'}",
        "head.num_classes=7",
        "--nproc",
        "2",
        "--max-restarts",
        "3",
    )
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.count("head.num_classes is 7 and the shards have 13 classes") == 1
    assert "Traceback" not in answer.stderr
    assert "restart" not in answer.stderr


def test_fewer_ranks_than_asked_for_train_nothing(endless, tmp_path, capsys):
    assert main(["--world-size", "2", str(endless), f"run={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this world has 1 ranks and --world-size is 2: ")
    assert error.count("\n") == 1
    assert main(["--world-size", "two", str(endless)]) == 2
    assert "--world-size is two: give a number of ranks" in capsys.readouterr().err
    assert main(["--world-size", "2:4", str(endless), f"run={tmp_path / 'run'}"]) == 2
    assert "this world has 1 ranks and --world-size is 2:4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def exchange() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def meet_the_end_of_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as lost:
        exchange()
    assert is_lost_rank(lost.value)
    behind = OSError("a checkpoint could not be written")
    behind.__context__ = lost.value
    assert is_lost_rank(behind)


def test_the_end_of_a_peer_is_known_by_gloos_words():
    # What rank 0 says would come first.
    with pytest.raises(RankError, match="rank 1 died"):
        run_on_ranks(2, meet_the_end_of_rank_1)
    assert not is_lost_rank(RuntimeError("shapes do not match"))
    assert not is_lost_rank(ConnectionResetError("of a shard's server"))

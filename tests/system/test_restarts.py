"""Restarts by `--max-restarts`: the errors that cause one, the messages, and the logged steps.

A restart after a kill alone is in test_label_sets.py.
"""

import json
import os
import re
import signal

import pytest

from tests.system.conftest import logging_recipe
from tests.system.processes import ROOT
from tests.system.runs import launched, losses

TAR = "train-000000.tar"


@pytest.mark.slow
def test_ranks_restart_after_a_transient_error_and_a_kill_and_log_every_step_once(
    glyphs, tmp_path, monkeypatch
):
    recipe, run = logging_recipe(glyphs, tmp_path, steps=30, save_every=3), tmp_path / "run"
    fault = {"call": "pread", "path": TAR, "errno": "EIO", "rank": 1, "restart": 0}
    monkeypatch.setenv("KWAY_TEST_FAULT", json.dumps(fault))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/faults"), prepend=os.pathsep)
    with launched(recipe, run, "--max-restarts", "3") as training:
        training.wait_for_step(4)
        os.kill(training.ranks[0], signal.SIGKILL)
        assert training.end() == 0, training.output
    assert sorted(losses(run)) == list(range(1, 31))
    output = training.output
    assert f"{TAR}: [Errno 5] Input/output error; attempt 8 of 8" in output
    assert re.search(rf"error: rank 1: .*{TAR}: \[Errno 5\].*\(8 attempts\)", output)
    assert "restart 1 of 3" in output
    assert "rank 0 was killed by SIGKILL (out of memory?); restart 2 of 3" in output
    assert "Traceback" not in output

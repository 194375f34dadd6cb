"""The table of errors and exit codes in docs/cluster.md: each row is tested with an injected error.

Lost ranks are in test_faults.py, a killed rank and a restart in test_label_sets.py, the exit codes
of several ranks in test_ranks.py, hangs in test_watchdog.py, signals in test_signals.py, and the
rendezvous in test_rendezvous.py.
"""

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.retry import TRANSIENT_ERRNOS
from tests.data.file_server import serving
from tests.file_errors import error
from tests.shards import glyph_recipe
from tests.system.processes import ROOT, write_recipe
from tests.system.runs import losses
from trainer.__main__ import main

TAR, CHECKPOINT = "train-000000.tar", "/checkpoints/step-"


@pytest.fixture
def train(glyphs: Path, tmp_path: Path) -> Callable[..., int]:
    """Train one step in this process, with changes to the recipe, and return the exit code."""

    def run(**changes: Any) -> int:
        changes = {"train__duration": {"steps": 1}, **changes}
        recipe = glyph_recipe(glyphs, tmp_path / "run", **changes)
        return main([str(write_recipe(tmp_path, recipe))])

    return run


def in_workers(fail: Callable[[], None], workers: int) -> Callable[[], None]:
    """Call `fail` in the loader processes if there are any, otherwise in this process."""
    own_pid = os.getpid()

    def fail_in_worker() -> None:
        if not workers or os.getpid() != own_pid:
            fail()

    return fail_in_worker


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err.splitlines()[-1]


def test_the_table_lists_every_error_that_is_retried():
    (row,) = re.findall(r"^\| transient .*", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE)
    names = re.findall(r"`(E[A-Z]+)`", row)
    assert {getattr(errno, name) for name in names} == TRANSIENT_ERRNOS


def test_a_transient_read_error_is_retried(train, injected, tmp_path):
    injected("pread", TAR, in_workers(error("EIO"), 1), times=3)
    injected("open", TAR, in_workers(error("ESTALE"), 1), times=2)
    assert train(data__workers=1) == 0
    assert list(losses(tmp_path / "run")) == [1]


@pytest.mark.parametrize(("name", "workers"), [("ESTALE", 0), ("EIO", 1)])
def test_a_transient_read_error_that_persists_exits_with_1_and_names_the_file(
    name, workers, train, injected, capfd
):
    injected("pread", TAR, in_workers(error(name), workers))
    assert train(data__workers=workers) == 1
    number = getattr(errno, name)
    original = f"{TAR}: [Errno {number}] {os.strerror(number)} (8 attempts)"
    assert original in last_line(capfd)


@pytest.mark.parametrize(("name", "workers"), [("EACCES", 0), ("ENOENT", 1)])
def test_a_read_error_that_is_not_transient_exits_with_2_immediately(
    name, workers, train, injected, capfd
):
    injected("pread", TAR, in_workers(error(name), workers))
    assert train(data__workers=workers) == 2
    assert os.strerror(getattr(errno, name)) in last_line(capfd)


def test_a_transient_checkpoint_error_is_retried(train, injected, tmp_path, caplog):
    injected("fsync", CHECKPOINT, error("EIO"), times=3)
    injected("rename", ".partial", error("ETIMEDOUT"), times=2)
    assert train() == 0
    injected("open", CHECKPOINT, error("ESTALE"), times=3)
    assert train(train__duration={"steps": 2}) == 0
    assert list(losses(tmp_path / "run")) == [1, 2]
    logged = [word for word in ("Errno 5]", "Errno 110]", "Errno 116]") if word in caplog.text]
    assert len(logged) == 3


@pytest.mark.parametrize(("name", "code"), [("EIO", 1), ("ENOSPC", 2)])
def test_exit_codes_for_a_checkpoint_that_cannot_be_written(name, code, train, injected, capfd):
    injected("fsync", CHECKPOINT, error(name))
    assert train() == code
    assert os.strerror(getattr(errno, name)) in last_line(capfd)


@pytest.mark.parametrize("calls", [("open",), ("lstat", "stat")])
def test_a_run_does_not_resume_from_an_older_checkpoint_after_a_transient_error(
    calls, train, injected, capfd
):
    assert train(checkpoint={"every": {"steps": 1}}, train__duration={"steps": 2}) == 0
    for call in calls:
        injected(call, "step-00000002", error("EIO"))
    assert train(train__duration={"steps": 3}) == 1
    assert re.search(r"step-00000002\S*: \[Errno 5\]", last_line(capfd))


@pytest.mark.parametrize(("status", "code"), [(503, 1), (404, 2)])
def test_exit_codes_for_shard_server_errors(status, code, glyphs, train, tmp_path, capfd):
    with serving(glyphs) as server:
        server.failures = {TAR: [status] * 9}
        cache = {"folder": str(tmp_path / "cache"), "attempts": 2}
        assert train(data__shards=server.url, data__cache=cache) == code
    assert f"{server.url}/{TAR}" in last_line(capfd)


def test_a_killed_loader_process_exits_with_1(train, injected, capfd):
    injected("pread", TAR, in_workers(lambda: os.kill(os.getpid(), signal.SIGKILL), 1))
    assert train(data__workers=1) == 1
    assert "a loader process was killed" in last_line(capfd)


@pytest.mark.parametrize(
    ("call", "path", "message"),
    [
        ("pread", TAR, "the machine ran out of memory"),
        ("fsync", CHECKPOINT, "out of memory: add memory"),
    ],
)
def test_out_of_memory_exits_with_1_and_a_suggestion(call, path, message, train, injected, capfd):
    def fail() -> None:
        raise MemoryError

    injected(call, path, fail)
    assert train() == 1
    assert message in last_line(capfd)


def test_a_non_finite_loss_exits_with_1(train, capfd):
    assert train(optimizer__lr=1e30, train__duration={"steps": 5}) == 1
    assert "is NaN" in last_line(capfd)


def test_an_unexpected_error_prints_its_traceback(train, injected):
    def fail() -> None:
        raise RuntimeError("a bug")

    injected("pread", TAR, fail)
    with pytest.raises(RuntimeError, match="a bug"):
        train()


def test_an_input_error_on_all_ranks_is_printed_once_and_not_retried(
    kway, endless, tmp_path, capfd
):
    run = f"run={tmp_path / 'run'}"
    options = ["--nproc", 2, "--max-restarts", 3]
    assert kway("train", endless, run, "head.num_classes=7", *options) == 2
    error = capfd.readouterr().err
    assert error.count("head.num_classes is 7, but the shards have 13 classes") == 1
    assert "Traceback" not in error
    assert "restart" not in error

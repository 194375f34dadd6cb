"""Rendezvous endpoints and ports that other programs use: a one-line error, and signals work."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.system.processes import KWAY, run, write_recipe
from tests.system.runs import last_step, launched


@contextmanager
def held_port() -> Iterator[int]:
    """A port whose connections the kernel accepts and no program answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def recipe(glyphs: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))


def joining(port: int, *conf: str) -> list[str]:
    endpoint = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [*endpoint, "--rdzv-conf", ",".join(conf)]


@pytest.mark.parametrize("static", [False, True])
def test_an_endpoint_that_does_not_answer_is_named_within_the_timeout(static, recipe):
    with held_port() as port:
        how = joining(port, "is_host=0", "join_timeout=2")
        if static:
            how = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
            how += ["--master-port", str(port), "--rdzv-conf", "join_timeout=2"]
        # Far more than the two seconds; torch alone takes five minutes.
        answer = run([*KWAY, "train", str(recipe), *how], timeout=60)
    assert answer.returncode == 1
    line = f"error: the rendezvous at 127.0.0.1:{port} accepts connections and has not answered"
    assert answer.stderr.startswith(line), answer.stderr
    assert answer.stderr.count("\n") == 1


def test_sigterm_ends_a_launcher_that_waits_for_such_an_endpoint(recipe, tmp_path):
    with (
        held_port() as port,
        launched(recipe, tmp_path / "run", *joining(port, "is_host=0")) as training,
    ):
        training.wait_for(lambda: "waiting for the machine" in training.words, "notice")
        training.process.send_signal(signal.SIGTERM)
        assert training.end(8) == 75


@pytest.mark.slow
def test_sigterm_ends_a_launcher_whose_host_was_stopped_while_the_ranks_train(endless, tmp_path):
    with held_port() as port:
        pass
    run_folder, how = tmp_path / "run", joining(port, "join_timeout=60")
    with (
        launched(endless, run_folder, *how, num=1, log=tmp_path / "host.log") as host,
        launched(endless, run_folder, *how, num=1, log=tmp_path / "other.log") as other,
    ):
        host.wait_for_step(2)
        os.kill(host.process.pid, signal.SIGSTOP)
        try:
            stood = last_step(run_folder)
            other.wait_for(lambda: last_step(run_folder) > stood + 200, "more steps")
            other.process.send_signal(signal.SIGTERM)
            assert other.end(20) == 75
        finally:
            os.kill(host.process.pid, signal.SIGCONT)
        assert host.end() == 75


def test_a_rendezvous_port_in_use_is_one_line(recipe):
    with held_port() as port:
        answer = run([*KWAY, "train", str(recipe), *joining(port, "is_host=1")])
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"error: the rendezvous at 127.0.0.1:{port} cannot be hosted")
    assert answer.stderr.count("\n") == 1


_UP_TO_TORCH = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.exit(os.environ.get("TORCH_CPP_LOG_LEVEL") != "ERROR")

sys.meta_path.insert(0, Finder())
os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
sys.argv = ["-m", "nothing"]
runpy.run_module("trainer", run_name="__main__")
"""


def test_ranks_of_torchrun_hide_native_warnings_before_they_import_torch():
    """torch reads the level when it is imported."""
    assert run([sys.executable, "-c", _UP_TO_TORCH]).returncode == 0


def test_an_error_of_rank_0_alone_is_one_line_without_stack_frames_of_other_ranks(recipe):
    with held_port() as port:
        command = [*KWAY, "train", str(recipe), f"telemetry.port={port}", "--nproc", "2"]
        answer = run(command)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"error: rank 0: telemetry.port {port}")
    assert answer.stderr.count("\n") == 1, answer.stderr

"""Rendezvous endpoints and ports that other programs use: a one-line error, and signals work."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError

from launch.ranks.placement import Placement
from launch.ranks.rendezvous import failure_reason, open_rendezvous
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


def not_answering(port: int) -> str:
    return f"the rendezvous at 127.0.0.1:{port} accepts connections but did not respond"


def test_an_endpoint_that_does_not_answer_is_named_within_the_timeout(recipe):
    with held_port() as port:
        # Far more than the two seconds; torch alone takes five minutes.
        answer = run(
            [*KWAY, "train", str(recipe), *joining(port, "is_host=0", "join_timeout=2")],
            timeout=60,
        )
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"error: {not_answering(port)}"), answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.fixture
def why_none(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The reason that a launcher gives for a rendezvous that fails."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # `open_rendezvous` sets it

    def why(**given: Any) -> str:
        placement = Placement(min_nodes=2, max_nodes=2, **given)
        with pytest.raises((RendezvousError, TimeoutError)) as failed:
            open_rendezvous(placement)
        return failure_reason(failed.value, placement)

    return why


def test_a_static_endpoint_that_does_not_answer_is_named_within_the_timeout(why_none):
    with held_port() as port:
        static = {"master_addr": "127.0.0.1", "master_port": port, "node_rank": 1}
        why = why_none(**static, rdzv_conf={"join_timeout": "1"})
    assert why.startswith(not_answering(port))


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


def test_a_rendezvous_port_in_use_is_named(why_none):
    with held_port() as port:
        why = why_none(rdzv_endpoint=f"127.0.0.1:{port}", rdzv_conf={"is_host": "1"})
    assert why.startswith(f"the rendezvous at 127.0.0.1:{port} cannot start")


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

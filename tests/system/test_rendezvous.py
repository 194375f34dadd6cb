"""Endpoints and ports that other programs use cause one-line errors, and signals still work."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError

from launch.ranks.placement import Placement
from launch.ranks.rendezvous import failure_reason, open_rendezvous
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import launched


@contextmanager
def unresponsive_port() -> Iterator[int]:
    """A port on which the kernel accepts connections but no program responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def recipe(glyphs: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))


@pytest.fixture
def failure_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The reason that a launcher reports for a failed rendezvous."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # `open_rendezvous` sets it

    def reason(**options: Any) -> str:
        placement = Placement(min_nodes=2, max_nodes=2, **options)
        with pytest.raises((RendezvousError, TimeoutError)) as failed:
            open_rendezvous(placement)
        return failure_reason(failed.value, placement)

    return reason


def test_an_unresponsive_endpoint_is_reported_within_the_timeout(failure_of):
    """torch's default is five minutes."""
    with unresponsive_port() as port:
        conf = {"is_host": "0", "join_timeout": "1"}
        reason = failure_of(rdzv_endpoint=f"127.0.0.1:{port}", rdzv_conf=conf)
    assert reason.startswith(f"the rendezvous at 127.0.0.1:{port} does not respond")


def test_sigterm_stops_a_launcher_that_is_waiting_for_an_unresponsive_endpoint(recipe, tmp_path):
    with unresponsive_port() as port:
        endpoint = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
        options = (*endpoint, "--rdzv-conf", "is_host=0")
        with launched(recipe, tmp_path / "run", *options) as training:
            training.wait_for(lambda: "waiting for the machine" in training.output, "notice")
            training.process.send_signal(signal.SIGTERM)
            assert training.end(8) == 75


def test_a_rendezvous_port_in_use_is_reported(failure_of):
    with unresponsive_port() as port:
        reason = failure_of(rdzv_endpoint=f"127.0.0.1:{port}", rdzv_conf={"is_host": "1"})
    assert reason.startswith(f"the rendezvous at 127.0.0.1:{port} cannot start")


def test_an_error_on_rank_0_alone_prints_one_line_without_stack_frames_of_other_ranks(
    kway, recipe, capfd
):
    with unresponsive_port() as port:
        assert kway("train", recipe, f"telemetry.port={port}", "--nproc", 2) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: rank 0: telemetry.port {port}")
    assert error.count("\n") == 1, error

"""Checks before Ray starts, and signals during start-up."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.deploy import server
from serving.deploy.session import kill_writers, make_session
from tests.tiny_bundle import write
from tests.waiting import wait_until


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
        yield Path(folder)


def test_a_session_needs_free_disk_space(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    assert make_session().parent == short
    free = SimpleNamespace(free=100 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    with pytest.raises(OSError, match=rf"{short} has 100 MiB of free space"):
        make_session()
    assert len(list(short.iterdir())) == 1  # the first session


def test_a_folder_path_too_long_for_sockets_is_rejected(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = short / ("x" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(OSError, match="at most 21 characters"):
        make_session()
    assert list(folder.iterdir()) == []


def test_processes_that_write_to_a_session_folder_are_killed_but_not_those_that_read(
    tmp_path: Path,
) -> None:
    log = tmp_path / "late.log"
    with subprocess.Popen(["sh", "-c", 'exec sleep 300 > "$0"', str(log)]) as writer:
        wait_until(log.exists)
        with subprocess.Popen(["tail", "-f", str(log)]) as reader:
            assert [one.pid for one in kill_writers(tmp_path, os.getpid())] == [writer.pid]
            assert writer.wait(timeout=60) == -signal.SIGKILL
            assert reader.poll() is None
            reader.kill()


@pytest.mark.parametrize("replacement", [RuntimeError("cannot build a schema"), SystemExit(1)])
def test_startup_ends_cleanly_if_a_library_replaces_the_exception_of_the_signal(
    tmp_path: Path,
    kway: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    replacement: BaseException,
) -> None:
    handlers = {number: signal.getsignal(number) for number in (2, 15, 1)}

    @contextmanager
    def interrupted(*_: object) -> Iterator[None]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise replacement from None
        yield

    monkeypatch.setattr(server, "running", interrupted)
    try:
        assert kway("serve", write(tmp_path / "bundle"), "--port", 0) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

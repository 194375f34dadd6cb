"""The check of a bundle and its galleries in a process of its own, before a server starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from data.retry import TransientError
from serving.config import ServingConfig
from serving.deploy.preparation import prepare
from tests.dispositions import default_signals
from tests.tiny_bundle import write
from tests.waiting import wait_until


def test_the_check_returns_the_first_class_and_the_kind_of_inputs(tmp_path: Path) -> None:
    prepared = prepare(write(tmp_path / "pets"), ServingConfig())
    assert (prepared.first_class, prepared.reads) == ("husky", "images")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise ValueError('damaged')", ValueError),
        ("raise TimeoutError('damaged')", TransientError),
        ("raise ModuleNotFoundError('damaged', name='x')", ModuleNotFoundError),
        ("import os; os.kill(os.getpid(), 9)", ChildProcessError),
    ],
)
def test_an_error_of_the_check_is_raised_in_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception]
) -> None:
    (tmp_path / "fastapi.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(kind) as caught:
        prepare(write(tmp_path / "pets"), ServingConfig())
    assert type(caught.value) is kind
    if kind is ModuleNotFoundError:
        assert caught.value.name == "x"
    if kind is not ChildProcessError:
        assert str(caught.value) == "damaged"
        assert f"{tmp_path}/fastapi.py" in caught.value.__notes__[0]


@default_signals()
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_a_signal_during_the_check_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "launch", "serve", str(write(tmp_path / "pets"))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        of_server = psutil.Process(process.pid)
        wait_until(of_server.children, possible=lambda: process.poll() is None)
        children = of_server.children()
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert process.stderr is not None
        assert process.stderr.read() == ""
    _, remaining = psutil.wait_procs(children, timeout=60)
    assert remaining == []

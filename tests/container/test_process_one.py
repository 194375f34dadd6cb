"""kway as process number 1 of a container, which the kernel spares signals without a handler."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_KWAY = "import sys; sys.argv[0] = 'kway'; from launch.main import main; main()"
_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
_SECONDS = 60

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="needs unshare and the right to make a process namespace",
)


def catches(process: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{process}/status").read_text().split("SigCgt:")[1]
    return bool(int(status.split()[0], 16) >> (number - 1) & 1)


def children(process: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def waited_for(ready, outer: subprocess.Popen) -> None:
    deadline = time.monotonic() + _SECONDS
    while not ready():
        assert outer.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@needs_namespaces
def test_a_command_without_a_handler_ends_by_sigterm(tmp_path):
    words = ["shard", "glyphs", "-o", str(tmp_path / "shards"), "--workers", "0"]
    command = [*_NAMESPACE, sys.executable, "-c", _KWAY, *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as outer:
        try:
            waited_for(lambda: children(outer.pid), outer)
            (first,) = children(outer.pid)
            waited_for(lambda: catches(first, signal.SIGTERM), outer)
            os.kill(first, signal.SIGTERM)
            assert outer.wait(_SECONDS) == 128 + signal.SIGTERM
        finally:
            outer.kill()


_FORKS = """
import os, signal, launch.main as kway
kway._end_by_sigterm()
assert signal.getsignal(signal.SIGTERM) is kway._end
if os.fork() == 0:
    os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
assert os.wait()[1] == 0, "the child has its parent's handler"
"""


@needs_namespaces
def test_what_it_forks_has_no_handler_of_its():
    subprocess.run([*_NAMESPACE, sys.executable, "-c", _FORKS], check=True, cwd=ROOT)


def test_any_other_process_is_left_as_it_is():
    look = f"import signal; {_KWAY.removesuffix('main()')}"
    look += "import launch.main as kway; kway._end_by_sigterm()\n"
    look += "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    subprocess.run([sys.executable, "-c", look], check=True, cwd=ROOT)

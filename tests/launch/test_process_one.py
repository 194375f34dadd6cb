"""kway as PID 1 of a container. The kernel ignores signals for which PID 1 has no handler."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dispositions import is_handled
from tests.process_tree import children
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
_KWAY = "import sys; sys.argv[0] = 'kway'; from launch.main import main; main()"
_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
_SECONDS = 60

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*_NAMESPACE, "true"], capture_output=True, timeout=120).returncode != 0,
    reason="requires unshare and permission to create a process namespace",
)


@needs_namespaces
def test_sigterm_ends_a_command_that_is_pid_1(tmp_path):
    words = ["shard", "glyphs", "-o", str(tmp_path / "shards"), "--workers", "0"]
    command = [*_NAMESPACE, sys.executable, "-c", _KWAY, *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as outer:
        try:
            wait_until(lambda: children(outer.pid), possible=lambda: outer.poll() is None)
            (first,) = children(outer.pid)
            wait_until(lambda: is_handled(first, signal.SIGTERM))
            os.kill(first, signal.SIGTERM)
            assert outer.wait(_SECONDS) == 128 + signal.SIGTERM
        finally:
            outer.kill()

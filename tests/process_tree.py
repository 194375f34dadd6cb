"""The processes that tests start: their children, and those that are still running.

All information comes from /proc, so no processes are found on systems other than Linux.

`python tests/process_tree.py RUN` waits until its standard input is closed and then kills the
processes of this test run.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Every process that a test run starts inherits this environment variable. It also identifies
# processes that have left the process tree of the run, such as daemons.
RUN = "KWAY_TEST_RUN"


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process, including zombies."""
    found: list[int] = []
    with suppress(OSError):  # a process or thread has ended
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def processes_of(value: str, name: str = RUN) -> list[int]:
    """Return the processes whose environment variable `name` has this value."""
    entry, found = f"{name}={value}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has exited, or belongs to another user
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def left_after(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait up to `seconds` for processes to exit, and return those that are still running."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.read()
    while found := processes_of(sys.argv[1]):  # a process may start another one meanwhile
        kill_all(found)
        time.sleep(0.02)

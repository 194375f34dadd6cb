"""Ends what a server started where the server itself no longer can: after SIGKILL, for instance.

Run as a process of its own, it waits for the end of its standard input, whose other end the server
holds; then it ends every process that writes into the session folder, and removes the folder.
All of Ray's processes log there.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_QUIET_ROUNDS = 4
_MAX_ROUNDS = 60
_ROUND_SECONDS = 0.5


@contextmanager
def guarded(session: Path) -> Iterator[None]:
    """While inside, and should this process be killed there, a guard stands by for `session`.

    Remove the folder before leaving: the guard then has nothing to do.
    """
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # signals to our group are not for it
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


def clean(session: Path, owner: int) -> None:
    """End the processes that write into `session`, all but `owner`, and remove the folder."""
    quiet = 0
    for _ in range(_MAX_ROUNDS):
        if quiet == _QUIET_ROUNDS or not session.exists():
            break
        spared = (owner, os.getpid())
        others = (one for one in psutil.process_iter() if one.pid not in spared)
        found = [process for process in others if _writes(process, session)]
        for process in found:
            process.kill()
        # One that was just being started shows itself in a later round.
        quiet = 0 if found else quiet + 1
        time.sleep(_ROUND_SECONDS)
    shutil.rmtree(session, ignore_errors=True)


def _writes(process: psutil.Process, session: Path) -> bool:
    try:
        opened = process.open_files()
    except (psutil.Error, OSError):  # ended meanwhile, or somebody else's
        return False
    # Who only reads, as `tail` does, is not the server's.
    return any(Path(file.path).is_relative_to(session) and file.mode != "r" for file in opened)


if __name__ == "__main__":
    server = os.getppid()
    sys.stdin.buffer.read()
    clean(Path(sys.argv[1]), server)

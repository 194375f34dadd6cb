"""The session folder and ports of one server, and the clean-up of all its processes and files.

The folder contains Ray's files and sockets, logs and secrets.

Run as a script, this module is the clean-up process of a server. Its standard input is a pipe that
the server keeps open. When the pipe is closed, the clean-up process kills every process that has a
file in the session folder open for writing, as all of Ray's processes do, and removes the folder.
This works even if the server is killed with SIGKILL.
"""

import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Single ports are chosen below the range of the blocks. Both ranges are below the system's
# ephemeral ports. Otherwise, an outgoing connection could take a port in the half minute before the
# server starts listening on it.
_FIRST_PORT, _FIRST_BLOCK, _LAST_BLOCK = 8_100, 12_000, 32_000
_ATTEMPTS = 100
# Not the global generator: processes that seeded it would choose the same ports.
_RANDOM = random.SystemRandom()
# Ray writes its logs to the folder. If the disk is full, Ray restarts its processes forever.
_MIN_FREE_BYTES = 2**28
# The system's limit on the length of a socket path, and Ray's longest path below the folder, with
# the largest process id.
_MAX_SOCKET_PATH = 107
_LONGEST_SUBPATH = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# The clean-up ends after this many consecutive rounds in which it finds no process.
_QUIET_ROUNDS = 4
_MAX_ROUNDS = 60
_ROUND_SECONDS = 0.5


def free_port(host: str, port: int, *, option: str = "--port") -> int:
    """Return `port`, or any free port if it is 0.

    Raises OSError if the port is taken or `host` is not an address of this machine. The message
    names the `option` to change.
    """
    if port == 0:
        return _any_port(host, option)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            fix = f"Stop the process that uses it, or pass another port with {option}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                fix = "Pass an address of this machine with --host"
            raise OSError(
                f"cannot listen on {host} port {port} ({error.strerror or error}). {fix}"
            ) from error
        return port


def _any_port(host: str, option: str) -> int:
    *most, last = _RANDOM.sample(range(_FIRST_PORT, _FIRST_BLOCK), _ATTEMPTS)
    for port in most:
        with suppress(OSError):
            return free_port(host, port, option=option)
    return free_port(host, last, option=option)


def free_block(num_ports: int) -> int:
    """Return the first of `num_ports` consecutive ports on loopback. The first two are free at the
    time of the call.

    The block is random, so that two servers do not share one: a proxy that connects to a dead
    replica must not reach a replica of another server. Raises OSError if no block is free.
    """
    for _ in range(_ATTEMPTS):
        first = _RANDOM.randrange(_FIRST_BLOCK, _LAST_BLOCK - num_ports)
        with suppress(OSError):
            for port in (first + 1, first):
                free_port("127.0.0.1", port)
            return first
    raise OSError(
        f"there is no free block of ports between {_FIRST_BLOCK} and {_LAST_BLOCK} on loopback. "
        "Stop processes that use ports in this range"
    )


def make_session() -> Path:
    """Create a folder in the temporary directory (TMPDIR). Raises OSError if Ray cannot use it."""
    session = Path(tempfile.mkdtemp(prefix="kway-ray-"))
    try:
        _check_usable(session)
    except OSError:
        session.rmdir()
        raise
    return session


def _check_usable(session: Path) -> None:
    free = shutil.disk_usage(session).free
    if free < _MIN_FREE_BYTES:
        raise OSError(
            f"{session.parent} has {free / 2**20:.0f} MiB of free space, but a server needs "
            f"{_MIN_FREE_BYTES / 2**20:.0f} MiB. Free some space, or set TMPDIR to another folder"
        )
    excess = len(f"{session}{_LONGEST_SUBPATH}") - _MAX_SOCKET_PATH
    if excess > 0:
        raise OSError(
            f"the path {session.parent} is too long for the paths of Ray's sockets. Set TMPDIR to "
            f"a folder whose path has at most {len(str(session.parent)) - excess} characters"
        )


@contextmanager
def cleaned_up(session: Path) -> Iterator[None]:
    """Start a process that cleans up `session` if this process is killed inside the context.

    If the folder is removed before the context exits, the clean-up process does nothing.
    """
    cleaner = subprocess.Popen(
        [sys.executable, "-P", __file__, str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # do not receive signals sent to our process group
    )
    assert cleaner.stdin is not None
    try:
        yield
    finally:
        cleaner.stdin.close()
        cleaner.wait()


def clean(session: Path, owner: int) -> None:
    """Kill all processes that write to `session`, except `owner`, and remove the folder."""
    quiet_rounds = 0
    for _ in range(_MAX_ROUNDS):
        if quiet_rounds == _QUIET_ROUNDS or not session.exists():
            break
        # A process that is still starting is found in a later round.
        quiet_rounds = 0 if kill_writers(session, owner) else quiet_rounds + 1
        time.sleep(_ROUND_SECONDS)
    shutil.rmtree(session, ignore_errors=True)


def kill_writers(session: Path, owner: int) -> list[psutil.Process]:
    """Kill all processes that write to `session`, except `owner` and this one, and return them."""
    excluded = (owner, os.getpid())
    others = (one for one in psutil.process_iter() if one.pid not in excluded)
    found = [process for process in others if _writes(process, session)]
    for process in found:
        process.kill()
    return found


def _writes(process: psutil.Process, session: Path) -> bool:
    try:
        opened = process.open_files()
    except (psutil.Error, OSError):  # already exited, or owned by another user
        return False
    # A process that only reads, such as `tail`, does not belong to the server.
    return any(Path(file.path).is_relative_to(session) and file.mode != "r" for file in opened)


if __name__ == "__main__":
    server = os.getppid()
    sys.stdin.buffer.read()
    clean(Path(sys.argv[1]), server)

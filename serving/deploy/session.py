"""The folder of one server: Ray's files and sockets, logs, secrets. It is gone with the server."""

import shutil
import tempfile
from pathlib import Path

# Ray writes its logs there, and without space it starts its processes again and again, for ever.
_LEAST_FREE_BYTES = 2**28
# Of a socket, by the system; and of Ray's longest below the folder, with the largest process id.
_LONGEST_ADDRESS = 107
_BELOW = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def make_session() -> Path:
    """A new folder where temporary files go (TMPDIR). Raises OSError where Ray could not use it."""
    session = Path(tempfile.mkdtemp(prefix="kway-ray-"))
    try:
        _check(session)
    except OSError:
        session.rmdir()
        raise
    return session


def _check(session: Path) -> None:
    free = shutil.disk_usage(session).free
    if free < _LEAST_FREE_BYTES:
        raise OSError(
            f"{session.parent} has {free / 2**20:.0f} MiB free and a server needs "
            f"{_LEAST_FREE_BYTES / 2**20:.0f}: make room, or let TMPDIR name another folder"
        )
    excess = len(f"{session}{_BELOW}") - _LONGEST_ADDRESS
    if excess > 0:
        raise OSError(
            f"{session.parent} is too long for the names of Ray's sockets: let TMPDIR name a "
            f"folder of at most {len(str(session.parent)) - excess} characters"
        )

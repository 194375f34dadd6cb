"""A temporary folder that is removed even if this process is killed.

Run as a script, this module is the process that removes the folder. Its standard input is a pipe
that is closed when the owner of the folder exits.
"""

import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Processes that were started by the owner may take a while to exit, and write to the folder.
_QUIET_SECONDS, _MAX_SECONDS = 3.0, 60.0


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a folder in the temporary directory (TMPDIR) for the duration of the context."""
    # The name is known before the folder exists, so a signal at any line leaves nothing behind.
    folder = Path(tempfile.gettempdir(), prefix + secrets.token_hex(4))
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # do not receive signals sent to our process group
    )
    assert remover.stdin is not None
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.kill()
        remover.communicate()  # closes the pipe


def _remove(folder: Path) -> None:
    started = changed = time.monotonic()
    while time.monotonic() - started < _MAX_SECONDS:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            changed = time.monotonic()
        elif time.monotonic() - changed > _QUIET_SECONDS:
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _remove(Path(sys.argv[1]))

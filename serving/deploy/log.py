"""The replicas' errors on the terminal of `kway serve`: they append to a file, which it follows.

Ray keeps the output of replicas in its session folder, where nobody looks and nothing stays.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_POLL_SECONDS = 0.3


def append_errors(path: Path) -> None:
    """Let this process append what kway logs to the file `path`."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("kway").addHandler(handler)


@contextmanager
def shown_errors(path: Path) -> Iterator[None]:
    """While inside, what is appended to the file `path` comes out on standard error."""
    path.touch()
    left = threading.Event()
    with path.open(encoding="utf-8", errors="replace") as file:
        thread = threading.Thread(target=_follow, args=(file, left), daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()


def _follow(file: TextIO, left: threading.Event) -> None:
    last = False
    while not last:
        last = left.wait(_POLL_SECONDS)
        if text := file.read():
            print(text, end="", file=sys.stderr, flush=True)

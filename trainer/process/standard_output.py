"""Standard output and error streams that keep working after their reader has closed them.

A run must not end because its terminal or a pipe such as `| tee` is closed, nor because it was
started with `>&-`.
"""

import errno
import io
import os
import sys
from typing import Any

# Errors of a pipe without a reader and of a closed terminal.
_CLOSED_ERRNOS = (errno.EPIPE, errno.EIO)


class _TolerantFile(io.FileIO):
    """A file that discards output once its reader has closed it."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in _CLOSED_ERRNOS:
                raise
        return len(data)


def hide_native_warnings() -> None:
    """Make torch's C++ code log only errors, unless TORCH_CPP_LOG_LEVEL is set. Call this before
    torch is imported.

    When a rank exits, its connections to the other ranks break. Each of these ranks would print a
    warning with dozens of stack frames, which would hide the one line that gives the reason.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def tolerate_closed_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that tolerate a closed reader. A stream
    that is already closed is redirected to /dev/null.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        original = getattr(sys, name)
        if original is None:
            _open_devnull_as(number)
        # Do not buffer, as with `python -u`, so that the last output of a killed rank is not lost.
        stream = io.TextIOWrapper(
            _TolerantFile(number, "w", closefd=False),
            encoding="utf-8" if original is None else original.encoding,
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, stream)


def _open_devnull_as(number: int) -> None:
    """Open /dev/null as file descriptor `number`. Otherwise the next opened file would get this
    number, and C++ code would write its output to that file.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    if devnull != number:
        os.dup2(devnull, number)
        os.close(devnull)

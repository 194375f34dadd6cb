"""Standard output and error that outlive whoever reads them: a run is not ended for want of
listeners, be it a terminal that is closed, `| tee` that dies with it, or `>&-`."""

import errno
import io
import os
import sys
from typing import Any

# A pipe that nobody reads any more; a terminal that is no more.
_CLOSED_ERRNOS = (errno.EPIPE, errno.EIO)


class _TolerantFile(io.FileIO):
    """What nobody hears any more goes nowhere."""

    def write(self, words: Any, /) -> int:
        left = memoryview(words).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in _CLOSED_ERRNOS:
                raise
        return len(words)


def hide_native_warnings() -> None:
    """Make torch's C++ code print errors only, unless TORCH_CPP_LOG_LEVEL is set. Call it before
    torch is imported.

    When a rank ends, its connections to the other ranks break. Each of them would print a warning
    with dozens of stack frames, which would hide the one line that gives the reason.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def tolerate_closed_output() -> None:
    """Make `sys.stdout` and `sys.stderr` such streams; those that are closed lead nowhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is None:
            _open_devnull_as(number)
        # Unbuffered, as `python -u` has it: what is said by a rank that is killed is heard.
        stream = io.TextIOWrapper(
            _TolerantFile(number, "w", closefd=False),
            encoding="utf-8" if before is None else before.encoding,
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, stream)


def _open_devnull_as(number: int) -> None:
    """Else another file would get the number, and be written to by what is said from C++."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)

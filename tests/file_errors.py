"""Makes file operations of this process, and of those forked from it, fail."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any


def inject(
    call: str,
    path: str,
    fail: Callable[[], None],
    *,
    times: int = 1_000_000,
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Make `os.<call>` call `fail` first for any path that contains `path`, until `fail` has raised
    `times` times. Processes forked from this one inherit the change."""
    original, remaining = getattr(os, call), times

    def failing(where: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal remaining
        name = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if remaining and path in name:
            try:
                fail()
            except Exception:
                remaining -= 1
                _retry_soon()
                raise
        return original(where, *arguments, **options)

    put(os, call, failing)


def error(name: str) -> Callable[[], None]:
    """Return a function that raises the OSError of errno `name`."""
    number = getattr(errno, name)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _retry_soon() -> None:
    """Shorten the backoff between attempts, which would otherwise take half a minute."""
    if (retry := sys.modules.get("data.retry")) is not None:
        vars(retry)["_LONGEST_SECONDS"] = 0.01

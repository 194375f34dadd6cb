"""Makes file operations of a process fail.

Python imports this module at startup if its folder is on PYTHONPATH. KWAY_TEST_FAULT is a JSON
object: `call`, `path`, `errno` and `times` as in `inject`, and the `rank` and `restart` to which
the fault applies.
"""

import errno
import json
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


def _applies(rank: int | None, restart: int | None) -> bool:
    expected = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart}
    return all(value in (None, int(os.environ.get(name, "-1"))) for name, value in expected.items())


if "KWAY_TEST_FAULT" in os.environ:
    fault = json.loads(os.environ["KWAY_TEST_FAULT"])
    if _applies(fault.pop("rank", None), fault.pop("restart", None)):
        inject(fail=error(fault.pop("errno")), **fault)

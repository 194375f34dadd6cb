"""Makes file operations of a process fail. Python imports this at its start where the folder is on
PYTHONPATH; KWAY_TEST_FAULT is JSON: `call`, `path`, `errno` and `times` as of `inject`, and the
`rank` and the `restart` that it is for.
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
    """Calls of `os.<call>` on a path that contains `path` call `fail` first, until it has raised
    `times` times, in this process and in each that is forked from it."""
    real, left = getattr(os, call), times

    def failing(where: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        named = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if left and path in named:
            try:
                fail()
            except Exception:
                left -= 1
                _retry_soon()
                raise
        return real(where, *arguments, **options)

    put(os, call, failing)


def error(name: str) -> Callable[[], None]:
    """What raises the OSError of errno `name`."""
    number = getattr(errno, name)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _retry_soon() -> None:
    """Eight attempts take a moment, not half a minute."""
    if (retry := sys.modules.get("data.retry")) is not None:
        vars(retry)["_LONGEST_SECONDS"] = 0.01


def _is_here(rank: int | None, restart: int | None) -> bool:
    here = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart}
    return all(value in (None, int(os.environ.get(name, "-1"))) for name, value in here.items())


if "KWAY_TEST_FAULT" in os.environ:
    fault = json.loads(os.environ["KWAY_TEST_FAULT"])
    if _is_here(fault.pop("rank", None), fault.pop("restart", None)):
        inject(fail=error(fault.pop("errno")), **fault)

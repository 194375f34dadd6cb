"""Makes chosen file operations of a process fail. Python imports this at its start where the folder
is on PYTHONPATH; `tests/faults/__init__.py` is how a test asks for it.

A fault fails `times` times in each process that has its rank and restart, and then no more.
"""

import errno
import json
import os
import sys
from typing import Any


class Fault:
    """The next `times` operations `call` on a path that contains `path` fail with `error`."""

    def __init__(self, call: str, path: str, error: str, times: int) -> None:
        self.call, self.path, self.number = call, path, getattr(errno, error)
        self.left = times

    def meet(self, call: str, path: str) -> None:
        if self.left and call == self.call and self.path in path:
            self.left -= 1
            _retry_soon()
            raise OSError(self.number, os.strerror(self.number))

    def install(self) -> None:
        """For the rest of the process: audit hooks stay."""
        for name in ("pread", "fsync"):
            setattr(os, name, _watched(name, getattr(os, name), self))
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename"):
            self.meet(event.removeprefix("os."), str(arguments[0]))


def _watched(name: str, real: Any, fault: Fault) -> Any:
    def call(descriptor: int, *arguments: Any) -> Any:
        fault.meet(name, os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor, *arguments)

    return call


def _retry_soon() -> None:
    """Eight attempts in a moment, not in half a minute."""
    if (retry := sys.modules.get("data.retry")) is not None:
        vars(retry)["_LONGEST_SECONDS"] = 0.01


def _is_for_this_process(rank: int | None, restart: int | None) -> bool:
    here = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart}
    return all(value in (None, int(os.environ.get(name, "-1"))) for name, value in here.items())


if "KWAY_TEST_FAULT" in os.environ:
    _asked = json.loads(os.environ["KWAY_TEST_FAULT"])
    if _is_for_this_process(_asked.pop("rank", None), _asked.pop("restart", None)):
        Fault(**_asked).install()

"""Waits for conditions that depend on other processes or threads."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60,
    *,
    possible: Callable[[], object] = lambda: True,
) -> None:
    """Wait until `condition()` is true.

    seconds: the limit, which should be ten times what an idle machine needs. possible: if it is
    false, for example because the process has exited, the wait fails at once.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert possible(), "the condition can no longer become true"
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.01)

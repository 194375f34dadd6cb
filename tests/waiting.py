"""Waits for conditions that other processes or threads fulfil."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60,
    *,
    possible: Callable[[], object] = lambda: True,
) -> None:
    """Wait until `condition()` is true.

    seconds: the limit, which should be ten times what an idle machine needs. possible: fail at once
    if this is false, for example because the process has exited.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert possible(), "the condition cannot be fulfilled any more"
        assert time.monotonic() < deadline, f"the condition is not fulfilled after {seconds} s"
        time.sleep(0.01)

"""The time that watches live by."""

import time


class SteadyClock:
    """Seconds since 1970, without jumps: when the system's clock is set, watches live on as long as
    was said, and listeners stay."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._start + time.monotonic()

"""Numbers as the commands print them."""

import time


def counted(number: int, what: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def seconds_since(started: float) -> str:
    """Since a `time.monotonic()`: `12.3 s`."""
    return f"{time.monotonic() - started:.1f} s"

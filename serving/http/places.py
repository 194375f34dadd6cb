"""How many of those requests there may be at once that last as long as their client likes."""

from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import ApiError


class Places:
    """So many places for `what`, such as streams."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._taken = most, what, 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A place; ApiError 429 where there is none."""
        if self._taken >= self._most:
            message = f"{self._most} {self._what} are open, and no more may be: try again later"
            raise ApiError(429, f"too_many_{self._what}", message, {"Retry-After": "5"})
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

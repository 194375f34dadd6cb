"""How many of those requests there may be at once that last as long as their client likes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import ApiError


class Places:
    """So many places for `what`, such as streams; `most_each`: that one client may have."""

    def __init__(self, most: int, what: str, *, most_each: int | None = None) -> None:
        self._most, self._what = most, what
        self._most_each = most if most_each is None else most_each
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str = "") -> Iterator[None]:
        """A place for a client; ApiError 429 where there is none."""
        self._check(client)
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]

    def _check(self, client: str) -> None:
        if self._taken.total() >= self._most:
            message = f"{self._most} {self._what} are open, and no more may be: try again later"
        elif self._taken[client] >= self._most_each:
            message = f"you have {self._most_each} {self._what} open, and no more may be: end one"
        else:
            return
        raise ApiError(429, f"too_many_{self._what}", message, {"Retry-After": "5"})

"""Limits on resources that clients hold for any length of time, in total and per client."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import ApiError


class Places:
    """At most `most` of `what`, such as streams, and at most `most_each` for one client."""

    def __init__(self, most: int, what: str, *, most_each: int | None = None) -> None:
        self._most, self._what = most, what
        self._most_each = most if most_each is None else most_each
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str = "") -> Iterator[None]:
        """Hold one place for `client` inside the context; ApiError 429 if none is free."""
        self.take(client, 1)
        try:
            yield
        finally:
            self.give_back(client, 1)

    def take(self, client: str, count: int) -> None:
        """Take `count` places for `client`; take none and raise ApiError 429 if fewer are free."""
        if self._taken.total() + count > self._most:
            message = f"the server's limit of {self._most} {self._what} is reached: try again later"
        elif self._taken[client] + count > self._most_each:
            message = f"your limit of {self._most_each} {self._what} is reached: end one first"
        else:
            self._taken[client] += count
            return
        code = f"too_many_{self._what}".replace(" ", "_")
        raise ApiError(429, code, message, {"Retry-After": "5"})

    def give_back(self, client: str, count: int) -> None:
        """Return places that `take` took."""
        self._taken -= Counter({client: count})  # drops clients that hold none

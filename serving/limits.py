"""Per-replica limits on client resources: streams, feeds, listeners and arriving bodies.

HAProxy passes a body that is larger than its buffer to a replica while it is still arriving. Such a
body takes none of the `max_requests` slots until it is complete, so slow uploads do not block other
clients. `Uploads` limits the number, the size and the minimum rate of these bodies instead.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from serving.api_error import ApiError
from serving.config import ServingConfig


class ClientLimit:
    """At most `most` of `what`, such as streams, and at most `most_each` per client."""

    def __init__(self, most: int, what: str, *, most_each: int | None = None) -> None:
        self._most, self._what = most, what
        self._most_each = most if most_each is None else most_each
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str = "") -> Iterator[None]:
        """Hold one slot for `client` inside the context. Raises ApiError 429 if none is free."""
        self.take(client, 1)
        try:
            yield
        finally:
            self.give_back(client, 1)

    def take(self, client: str, count: int) -> None:
        """Take `count` slots for `client`. Takes none and raises ApiError 429 if fewer are free."""
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
        """Return slots taken with `take`."""
        self._taken -= Counter({client: count})  # drops clients whose count is 0


class Uploads:
    """The bodies that are arriving at one replica. Use it from one event loop."""

    def __init__(self, config: ServingConfig) -> None:
        self._count = ClientLimit(
            config.max_uploads, "uploads", most_each=config.max_uploads_per_client
        )
        # One body of the maximum size always fits.
        self._bytes = ClientLimit(
            max(config.max_upload_bytes, config.max_body_bytes),
            "upload bytes",
            most_each=max(config.max_upload_bytes_per_client, config.max_body_bytes),
        )
        self._grace_seconds = config.upload_grace_seconds
        self._least_rate = config.min_upload_bytes_per_second

    async def parts(self, client: str, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a request body. It counts as an upload of `client` until the end.

        Raises ApiError: 429 if there are too many uploads or they hold too many bytes; 408 if the
        body arrives too slowly. Close the generator if you do not read it to its end.
        """
        received, started = 0, asyncio.get_running_loop().time()
        with self._count.one(client):
            try:
                while (part := await self._next(body, started, received)) is not None:
                    self._bytes.take(client, len(part))
                    received += len(part)
                    yield part
            finally:
                self._bytes.give_back(client, received)

    async def _next(
        self, body: AsyncIterator[bytes], started: float, received: int
    ) -> bytes | None:
        """The next part, or None at the end of the body. Raises ApiError 408 if it is late."""
        seconds = self._grace_seconds + received / self._least_rate
        try:
            async with asyncio.timeout_at(started + seconds):
                return await anext(body, None)
        except TimeoutError as error:
            message = (
                f"only {received} bytes of the body arrived within {seconds:.1f} s: send at least "
                f"{self._least_rate} bytes a second"
            )
            raise ApiError(408, "slow_body", message) from error

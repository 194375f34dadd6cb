"""Per-replica limits on what clients use, such as uploads.

A body does not occupy a `max_requests` slot until it is complete, so slow uploads do not block
other clients. `Uploads` limits the number, size and minimum rate of these bodies instead.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from serving.api_error import ApiError
from serving.config import ServingConfig


class ClientLimit:
    """Limits `what`, such as uploads, to `most` in total and `per_client` per client.

    A client is identified by `Clients.client_of` (`serving/tokens.py`).
    """

    def __init__(
        self, most: int, what: str, *, per_client: int | None = None, retry_seconds: int = 5
    ) -> None:
        self._most, self._what, self._retry_seconds = most, what, retry_seconds
        self._per_client = most if per_client is None else per_client
        self._of_clients: dict[str, int] = {}
        self.in_use = 0

    @contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """Acquire one slot for `client` for the duration of the context. Raises ApiError 429 if
        none is free."""
        self.acquire(client, 1)
        try:
            yield
        finally:
            self.release(client, 1)

    def acquire(self, client: str, count: int) -> None:
        """Acquire `count` slots for `client`. If fewer are free, acquires none and raises ApiError
        429."""
        of_client = self._of_clients.get(client, 0)
        if self.in_use + count > self._most:
            message = (
                f"the server has reached its limit of {self._most} {self._what}. Try again later"
            )
        elif of_client + count > self._per_client:
            message = (
                f"you have reached your limit of {self._per_client} {self._what}. Finish or close "
                "another request first"
            )
        else:
            self._of_clients[client] = of_client + count
            self.in_use += count
            return
        code = f"too_many_{self._what}".replace(" ", "_")
        raise ApiError(429, code, message, {"Retry-After": str(self._retry_seconds)})

    def release(self, client: str, count: int) -> None:
        """Release slots acquired with `acquire`."""
        self.in_use -= count
        left = self._of_clients.pop(client, 0) - count
        if left:
            self._of_clients[client] = left


class Uploads:
    """Limits the request bodies that one replica is receiving. Use it from a single event loop."""

    def __init__(self, config: ServingConfig) -> None:
        self._count = ClientLimit(
            config.max_uploads, "uploads", per_client=config.max_uploads_per_client
        )
        # One body of the maximum size always fits.
        self._bytes = ClientLimit(
            max(config.max_upload_bytes, config.max_body_bytes),
            "upload bytes",
            per_client=max(config.max_upload_bytes_per_client, config.max_body_bytes),
        )
        self._max_body_bytes = config.max_body_bytes
        self._grace_seconds = config.upload_grace_seconds
        self._min_rate = config.min_upload_bytes_per_second

    @contextmanager
    def held(self, client: str, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` of `client` for the duration of the context. Raises ApiError 429 if the
        total size is too large."""
        self._bytes.acquire(client, num_bytes)
        try:
            yield
        finally:
            self._bytes.release(client, num_bytes)

    async def receive(self, client: str, receive: Receive) -> bytes:
        """Receive a request body, which counts as an upload of `client` until it ends.

        Raises ApiError: 408 if the body arrives too slowly, 413 if it is too large, 429 if there
        are too many uploads or their total size is too large. Raises ClientDisconnect if the client
        disconnects.
        """
        parts: list[bytes] = []
        received, started = 0, asyncio.get_running_loop().time()
        with self._count.slot(client):
            try:
                while True:
                    message = await self._in_time(receive(), started, received)
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part: bytes = message.get("body", b"")
                    if received + len(part) > self._max_body_bytes:
                        raise body_too_large(self._max_body_bytes)
                    self._bytes.acquire(client, len(part))
                    received += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
            finally:
                self._bytes.release(client, received)

    async def _in_time(self, message: Awaitable[Message], started: float, received: int) -> Message:
        seconds = self._grace_seconds + received / self._min_rate
        try:
            async with asyncio.timeout_at(started + seconds):
                return await message
        except TimeoutError as error:
            text = (
                f"only {received} bytes of the body arrived within {seconds:.1f} s. Send at least "
                f"{self._min_rate} bytes/s"
            )
            raise ApiError(408, "slow_body", text) from error


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes. Split the request"
    return ApiError(413, "body_too_large", message)

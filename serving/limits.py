"""Per-replica limits on what clients use, such as uploads.

A body does not occupy a `max_requests` slot until it is complete, so slow uploads do not block
other clients. `Uploads` limits the number, size and minimum rate of these bodies instead.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from serving.api_error import RETRY, ApiError
from serving.config import ServingConfig
from trainer.bundle.spec import Reads


class ClientLimit:
    """Limits `what`, such as uploads, to `most` in total and `per_client` per client.

    A client is identified by `Clients.client_of` (`serving/tokens.py`).
    """

    def __init__(
        self,
        most: int,
        what: str,
        *,
        per_client: int,
        retry_seconds: int = 5,
        full: Callable[[], ApiError] | None = None,
    ) -> None:
        """`full` returns the error if the limit in total is reached; by default, it is
        `too_many_…`."""
        self._most, self._what, self._retry_seconds = most, what, retry_seconds
        message = f"the server has reached its limit of {most} {what}. Try again later"
        self._per_client, self._full = per_client, full or partial(self._error, message)
        self._of_clients: dict[str, int] = {}
        self.in_use = 0

    @contextmanager
    def slots(self, client: str, count: int = 1) -> Iterator[None]:
        """Acquire slots for `client` for the duration of the context."""
        self.acquire(client, count)
        try:
            yield
        finally:
            self.release(client, count)

    def acquire(self, client: str, count: int) -> None:
        """Acquire `count` slots for `client`. If fewer are free, acquires none and raises ApiError
        429."""
        of_client = self._of_clients.get(client, 0)
        if self.in_use + count > self._most:
            raise self._full()
        if of_client + count > self._per_client:
            raise self._error(
                f"you have reached your limit of {self._per_client} {self._what}. Finish or close "
                "another request first"
            )
        self._of_clients[client] = of_client + count
        self.in_use += count

    def release(self, client: str, count: int) -> None:
        """Release slots acquired with `acquire`."""
        self.in_use -= count
        left = self._of_clients.pop(client, 0) - count
        if left:
            self._of_clients[client] = left

    def _error(self, message: str) -> ApiError:
        code = f"too_many_{self._what}".replace(" ", "_")
        return ApiError(429, code, message, {"Retry-After": str(self._retry_seconds)})


class Uploads:
    """Limits the request bodies that one replica is receiving. Use it from a single event loop."""

    def __init__(self, config: ServingConfig) -> None:
        self._count = ClientLimit(
            config.max_uploads, "uploads", per_client=config.max_uploads_per_client
        )
        # One body of the maximum size always fits.
        self.bytes = ClientLimit(
            max(config.max_upload_bytes, config.max_body_bytes),
            "upload bytes",
            per_client=max(config.max_upload_bytes_per_client, config.max_body_bytes),
        )
        self._max_body_bytes = config.max_body_bytes
        self._grace_seconds = config.upload_grace_seconds
        self._min_rate = config.min_upload_bytes_per_second

    async def receive(self, client: str, receive: Receive) -> bytes:
        """Receive a request body, which counts as an upload of `client` until it ends.

        Raises ApiError: 408 if the body arrives too slowly, 413 if it is too large, 429 if there
        are too many uploads or their total size is too large. Raises ClientDisconnect if the client
        disconnects.
        """
        parts: list[bytes] = []
        received, started = 0, asyncio.get_running_loop().time()
        with self._count.slots(client):
            try:
                while True:
                    seconds = self._grace_seconds + received / self._min_rate
                    async with asyncio.timeout_at(started + seconds):
                        message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part: bytes = message.get("body", b"")
                    if received + len(part) > self._max_body_bytes:
                        raise body_too_large(self._max_body_bytes)
                    self.bytes.acquire(client, len(part))
                    received += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
            except TimeoutError as error:
                text = (
                    f"only {received} bytes of the body arrived within {seconds:.1f} s. Send at "
                    f"least {self._min_rate} bytes/s"
                )
                raise ApiError(408, "slow_body", text) from error
            finally:
                self.bytes.release(client, received)


def too_busy() -> ApiError:
    message = "too many requests are waiting for the model. Try again"
    return ApiError(429, "too_busy", message, RETRY)


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes. Split the request"
    return ApiError(413, "body_too_large", message)


def check_count(count: int, what: str, most: int) -> None:
    """Raise ApiError 413 for more than `most` images, texts or classes in a request."""
    if count > most:
        # For images, the error code is too_many_pictures.
        code = f"too_many_{'pictures' if what == 'images' else what}"
        message = f"the request has {count} {what}, but the limit is {most}. Split the request"
        raise ApiError(413, code, message)


def check_inputs(inputs: Sequence[bytes | str], reads: Reads, limits: ServingConfig) -> None:
    """Raise ApiError for no inputs, too many of them, or a text that is too long."""
    if not inputs:
        what = reads.removesuffix("s")
        raise ApiError(
            400, "no_input", f"the request does not contain any {reads}. Send at least one {what}"
        )
    check_count(len(inputs), reads, limits.max_inputs)
    most = limits.max_text_chars
    for position, one in enumerate(inputs if reads == "texts" else ()):
        if len(one) > most:
            raise ApiError(
                413,
                "text_too_long",
                f"texts[{position}] has {len(one)} characters, but the limit is {most}. Shorten "
                "the text",
            )

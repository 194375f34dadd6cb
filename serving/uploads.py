"""Request bodies that are still arriving: how many, how large and how slow they may be.

A body that is larger than HAProxy's buffer is passed to a replica while it is still arriving. It
takes none of the `max_requests` slots until it is complete, so slow uploads do not block other
clients. The limits here bound the number and memory of such bodies instead.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from serving.config import ServingConfig
from serving.errors import ApiError
from serving.places import Places


class Uploads:
    """The bodies that are arriving at one replica. Used from one event loop."""

    def __init__(self, config: ServingConfig) -> None:
        self._places = Places(
            config.max_uploads, "uploads", most_each=config.max_uploads_per_client
        )
        # One body of the maximum size always fits.
        self._bytes = Places(
            max(config.max_upload_bytes, config.max_body_bytes),
            "upload bytes",
            most_each=max(config.max_upload_bytes_per_client, config.max_body_bytes),
        )
        self._grace_seconds = config.upload_grace_seconds
        self._least_rate = config.min_upload_bytes_per_second

    async def parts(self, client: str, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a body of `client`, which counts as an upload until the end.

        Raises ApiError: 429 if there are too many uploads or they hold too many bytes; 408 if the
        body arrives too slowly. Close the generator if you do not read it to its end.
        """
        received, started = 0, asyncio.get_running_loop().time()
        with self._places.one(client):
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
        """The next part; None at the end of the body. Raises ApiError 408 if it is late."""
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

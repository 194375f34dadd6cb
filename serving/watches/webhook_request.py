"""`Sender`: sends one signed request to the receiver of a webhook.

The signature follows the Standard Webhooks specification 1.0 (standardwebhooks.com): HMAC-SHA256 of
the id, the time and the body. A redirect is an error, because it could lead to a host that is not
allowed, and responses are not decompressed. At most 4 KiB of a response are read.
"""

import asyncio
import base64
import hmac
import logging
import time

import httpx

from serving.watches.webhook import Webhook

_SECONDS = 10.0
# A connection can be reused if the response was read to its end.
_MAX_RESPONSE_BYTES = 4096


class DeliveryError(Exception):
    """The receiver did not accept the request. The message contains nothing from the response."""


class Sender:
    """Sends requests over connections that are kept open. Use it from a single event loop."""

    def __init__(self) -> None:
        # httpx logs URLs, which may contain tokens, at level INFO.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        # `trust_env` of the transport reads SSL_CERT_FILE; that of the client would read proxies
        # and .netrc.
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                trust_env=True, limits=httpx.Limits(max_keepalive_connections=20)
            ),
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # `_SECONDS` limits the whole request
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, webhook: Webhook, message_id: str, body: bytes) -> None:
        """Send `body`, which is JSON. Raises DeliveryError unless the response has status 2xx."""
        headers = {
            "content-type": "application/json",
            "user-agent": "kway",
            **_signature(webhook.key, message_id, int(time.time()), body),
        }
        try:
            async with (
                asyncio.timeout(_SECONDS),
                self._client.stream("POST", webhook.url, content=body, headers=headers) as response,
            ):
                await _read_little(response)
        except TimeoutError:
            raise DeliveryError(f"no response within {_SECONDS:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DeliveryError(f"the request failed ({type(error).__name__})") from error
        if not response.is_success:
            raise DeliveryError(f"the receiver responded with status {response.status_code}")


def _signature(key: bytes | None, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    if key is not None:
        digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


async def _read_little(response: httpx.Response) -> None:
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > _MAX_RESPONSE_BYTES:
            return

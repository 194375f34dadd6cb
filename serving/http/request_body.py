"""Read request bodies within limits: parse the JSON, and decode the images in it, which are base64
or data URLs.

Other URLs are rejected and nothing is fetched, to prevent server-side request forgery: a server
that fetched URLs for clients could be used to send requests to internal hosts.
"""

import base64
import binascii
import re
from collections.abc import Mapping

from fastapi import Request
from python_multipart.multipart import parse_options_header

from serving.api_error import ApiError, M, validated
from serving.config import ServingConfig
from serving.limits import body_too_large, max_values
from serving.service import InProgress, Service

_DATA_URL = re.compile(r"data:(image/[\w.+-]+|application/octet-stream)?;base64,", re.IGNORECASE)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def content_type(request: Request) -> tuple[str, dict[str, str]]:
    """Return the media type of a request, in lower case, and its parameters. A missing type is
    ""."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    parameters = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in options.items()
    }
    return kind.decode("latin-1").strip().lower(), parameters


def check_charset(parameters: Mapping[str, str]) -> None:
    """Raise ApiError 415 if a content type states a charset of which not every text is UTF-8."""
    charset = parameters.get("charset", "")
    if charset.lower() not in ("", "utf-8", "utf8", "us-ascii"):
        message = f"charset {charset[:40]!r} is not supported. Send UTF-8"
        raise ApiError(415, "unknown_charset", message)


async def read_body(request: Request, service: Service, progress: InProgress) -> bytes:
    """Receive the body of a request, which counts as an upload of its client until it has arrived,
    and acquire a slot for `progress`. Parse the body only after this, because slots limit the
    amount of concurrent parsing.

    Raises ApiError: 413 if the Content-Length or the body exceeds the limit; 415 for a compressed
    body; 429 if there are too many uploads or requests. Raises ClientDisconnect if the client
    disconnects. The timeout of `Service.admitted` ends slow uploads.
    """
    limit = service.config.max_body_bytes
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or int(length[:20]) > limit:
        raise body_too_large(limit)
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {encoding[:40]!r} is not supported. Send the body uncompressed"
        raise ApiError(415, "unknown_encoding", message)
    client, bodies = request.state.client, service.shared.upload_bytes
    parts: list[bytes] = []
    received = 0
    with service.shared.uploads.slots(client):
        try:
            async for part in request.stream():
                if received + len(part) > limit:
                    raise body_too_large(limit)
                bodies.acquire(client, len(part))
                received += len(part)
                parts.append(part)
        finally:
            bodies.release(client, received)
    progress.acquire_slot()
    return b"".join(parts)


def parse_json(
    model: type[M], raw: bytes, limits: ServingConfig, code: str, *, status: int = 422
) -> M:
    """Parse UTF-8 JSON and validate it as `validated` does. Call this function in a thread if the
    JSON is long.

    JSON with too many values is rejected before any value is created: `invalid_json`.
    """
    check_num_values(raw, max_values(limits))
    return validated(model, raw, code, status=status)


def check_num_values(raw: bytes, most: int) -> None:
    """Raise ApiError 400 for JSON with more than about `most` values, without parsing it. Each
    value, or key-value pair, follows a `,`, `[` or `{` outside a string.

    The first pass also counts these characters inside strings. If that count exceeds the limit, a
    second pass removes the strings first. Both passes run in C and allocate little more than the
    size of `raw`.
    """
    if _count_starts(raw) <= most:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_over = bare.count(b'"') > 4 * most  # two for the key and two for its value
    if is_over or _count_starts(b"".join(bare.split(b'"')[::2])) > most:
        message = (
            f"the JSON contains more than {most} values. Split the request, and send images as "
            "encoded files"
        )
        raise ApiError(400, "invalid_json", message)


def _count_starts(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def image_bytes(text: str, field: str) -> bytes:
    """Decode a base64-encoded image file, or a URL `data:image/…;base64,…`.

    Raises ApiError: 422 `urls_refused` for any other URL, and 400 `invalid_base64` for invalid
    base64. The message names the input as `field`.
    """
    data_url = _DATA_URL.match(text)
    if data_url is None and _URL.match(text[:64]):
        raise ApiError(
            422,
            "urls_refused",
            f"{field} is a URL, but this server does not fetch URLs. Send the image itself: "
            "base64-encoded, as a file in a form, or as the body with Content-Type: image/jpeg",
        )
    start = 0 if data_url is None else data_url.end()
    try:
        return base64.b64decode(text[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400,
            "invalid_base64",
            f"{field} is not valid base64 ({error}). Send a base64-encoded image file",
        ) from error

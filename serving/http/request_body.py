"""Read request bodies within limits: decompress the bytes, parse the JSON, and decode the images in
it, which are base64 or data URLs.

Other URLs are rejected and nothing is fetched, to prevent server-side request forgery: a server
that fetched URLs for clients could be used to send requests to internal hosts.
"""

import asyncio
import base64
import binascii
import json
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from email.message import Message as Headers

from fastapi import Request
from starlette.types import Message, Receive

from serving.api_error import ApiError
from serving.limits import Uploads
from serving.service import InProgress, Service

_PIECE = 2**16
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}
# Limit per body. Callers add the limits on inputs and classes where these apply.
MAX_VALUES = 10_000
_MAX_KEYS = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DATA_URL = re.compile(r"data:(image/[\w.+-]+|application/octet-stream)?;base64,", re.IGNORECASE)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def content_type(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the media type, in lower case, and the charset of a request. A missing value is ""."""
    kind, separator, _ = headers.get("content-type", "").partition(";")
    charset = _charset(headers["content-type"]) if separator else ""
    return kind.strip().lower(), charset


def _charset(header: str) -> str:
    message = Headers()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ")
    charset = message.get_param("charset", "")
    return charset if isinstance(charset, str) else charset[2]


async def read_body(request: Request, limit: int, service: Service, progress: InProgress) -> bytes:
    """Read the body of a request, then acquire a slot for `progress`. Raises the same ApiErrors as
    `bounded_parts`.

    Parse the body only after this, because slots limit the amount of concurrent parsing.
    """
    _check_length(request, limit)
    first = await service.uploads.first(request.state.client, request.receive)
    raw: bytes = first.get("body", b"")
    # Most bodies have arrived completely. The others are read in parts, which takes longer.
    if first["type"] != "http.request" or first.get("more_body", False) or encoding_of(request):
        whole = Request(request.scope, _after(first, request.receive))
        raw = b"".join([part async for part in bounded_parts(whole, limit, service.uploads)])
    elif len(raw) > limit:
        raise _too_large(limit)
    progress.acquire_slot()
    return raw


def _after(first: Message, receive: Receive) -> Receive:
    """Return a function that returns `first` once, and then the results of `receive`."""
    messages = [first]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received


def _check_length(request: Request, limit: int) -> None:
    """Raise ApiError 413 if the Content-Length exceeds `limit`."""
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or int(length[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes. Split the request"
    return ApiError(413, "body_too_large", message)


async def bounded_parts(
    request: Request, limit: int, uploads: Uploads
) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed parts of a body. The body counts as one of `uploads` until it ends.

    Raises ApiError: 413 if the Content-Length or the decompressed size exceeds `limit`; 400 and 415
    as in `decompressed_parts`; 408 and 429 as in `Uploads.parts`. Close the generator if you do not
    read it to its end.
    """
    _check_length(request, limit)
    received = 0
    client = request.state.client
    async with aclosing(uploads.parts(client, decompressed_parts(request))) as parts:
        async for part in parts:
            received += len(part)
            if received > limit:
                raise _too_large(limit)
            yield part


def encoding_of(request: Request) -> str:
    """Return the content encoding of a body in lower case, or "" if there is none."""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    return "" if encoding == "identity" else encoding


async def decompressed_parts(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a body, decompressed if it is compressed.

    Raises ApiError: 415 for an unsupported content encoding, 400 for damaged or truncated data.
    """
    encoding = encoding_of(request)
    if not encoding:
        parts: AsyncIterator[bytes] = request.stream()
    elif encoding in _WINDOW_BITS:
        parts = _decompressed(request.stream(), encoding)
    else:
        message = f"Content-Encoding {encoding[:40]!r} is not supported. Use gzip or deflate"
        raise ApiError(415, "unknown_encoding", message)
    async for part in parts:
        yield part


async def _decompressed(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    unpacking = zlib.decompressobj(_WINDOW_BITS[encoding])
    async for part in parts:
        is_full = True
        while part or is_full:
            try:
                piece = unpacking.decompress(part, _PIECE)
            except zlib.error as error:
                raise _invalid_compression(encoding, "is corrupted") from error
            # After a full piece, zlib may still have output, even if it has consumed the entire
            # part.
            part, is_full = unpacking.unconsumed_tail, len(piece) == _PIECE
            if piece:
                yield piece
                await asyncio.sleep(0)  # let other requests run
        if unpacking.unused_data:
            raise _invalid_compression(encoding, "has trailing data")
    if not unpacking.eof:
        raise _invalid_compression(encoding, "is truncated")


def _invalid_compression(encoding: str, what: str) -> ApiError:
    return ApiError(400, "invalid_compression", f"the {encoding} body {what}. Compress it again")


def parse_json(raw: bytes, most: int = MAX_VALUES) -> object:
    """Parse UTF-8 JSON. It may contain at most about `most` values.

    Raises ApiError 400 `invalid_json` for invalid UTF-8 or JSON, JSON that is nested too deeply,
    duplicate keys, objects with too many keys, numbers with thousands of digits and lone
    surrogates. JSON with too many values is rejected before any value is created. Call this
    function in a thread, because parsing megabytes takes a long time.
    """
    _check_count(raw, most)
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicate_keys)
        if _SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise _invalid_json("the nesting is too deep") from error
    except UnicodeDecodeError as error:
        raise _invalid_json(f"invalid UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid_json("a string contains a lone surrogate") from error
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except ValueError as error:
        raise _invalid_json(str(error)) from error
    return found


def _check_count(raw: bytes, most: int) -> None:
    """Check the number of values without parsing. Each value, or key-value pair, follows a `,`, `[`
    or `{` outside a string.

    The first pass also counts these characters inside strings. If that count exceeds the limit, a
    second pass removes the strings first. Both passes run in C and allocate little more than the
    size of `raw`.
    """
    if _count_starts(raw) <= most:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_over = bare.count(b'"') > 4 * most  # two for the key and two for its value
    if is_over or _count_starts(b"".join(bare.split(b'"')[::2])) > most:
        raise _invalid_json(
            f"the JSON contains more than {most} values. Split the request, and send images as "
            "encoded files"
        )


def _count_starts(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _without_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, but the limit is {_MAX_KEYS}")
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:80]!r}")
        found[key] = value
    return found


def _invalid_json(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"invalid JSON: {reason}")


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

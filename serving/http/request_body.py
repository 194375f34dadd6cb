"""The bytes of a request's body: decompressed, and read within the limits of the server."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from email.message import Message

from fastapi import Request

from serving.api_error import ApiError
from serving.limits import Uploads
from serving.service import InProgress, Service


def content_type(headers: Mapping[str, str]) -> tuple[str, str]:
    """The media type, in lower case, and the charset of a request; "" for what it does not say."""
    kind, separator, _ = headers.get("content-type", "").partition(";")
    charset = _charset(headers["content-type"]) if separator else ""
    return kind.strip().lower(), charset


def _charset(stated: str) -> str:
    message = Message()
    message["content-type"] = stated.replace("\r", " ").replace("\n", " ")
    charset = message.get_param("charset", "")
    return charset if isinstance(charset, str) else charset[2]


async def whole_body(request: Request, limit: int, service: Service, progress: InProgress) -> bytes:
    """The body of a request; then `progress` has a slot. Raises the ApiErrors of `bounded`.

    Parse the body only afterwards, because slots limit such work.
    """
    raw = b"".join([part async for part in bounded(request, limit, service.uploads)])
    progress.take_slot()
    return raw


async def bounded(request: Request, limit: int, uploads: Uploads) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed parts of a body, which counts as one of `uploads` meanwhile.

    Raises ApiError: 413 if its stated length, or its length as received or decompressed, exceeds
    `limit`; 400 and 415 as `plain_parts`; 408 and 429 as `Uploads.parts`. Close the generator if
    you do not read it to its end.
    """
    too_large = ApiError(
        413, "body_too_large", f"the body is over {limit} bytes: send less at once"
    )
    stated = request.headers.get("content-length", "0")
    if not (stated.isascii() and stated.isdecimal()) or int(stated[:20]) > limit:
        raise too_large
    received = 0
    async with aclosing(uploads.parts(request.state.client, plain_parts(request))) as parts:
        async for part in parts:
            received += len(part)
            if received > limit:
                raise too_large
            yield part


_PIECE = 2**16
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}


def encoding_of(request: Request) -> str:
    """The content encoding of a body, in lower case; "" for none."""
    stated = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    return "" if stated == "identity" else stated


def plain_only(request: Request) -> None:
    """Raise ApiError 415 for a compressed body of lines, because its length has no limit."""
    if encoding := encoding_of(request):
        message = f"lines must not be compressed: remove Content-Encoding {encoding[:40]}"
        raise ApiError(415, "unknown_encoding", message)


async def plain_parts(request: Request) -> AsyncGenerator[bytes, None]:
    """The parts of a body, decompressed if it is compressed.

    Raises ApiError: 415 for another content encoding, 400 for damaged or truncated data.
    """
    encoding = encoding_of(request)
    if not encoding:
        parts: AsyncIterator[bytes] = request.stream()
    elif encoding in _WINDOW_BITS:
        parts = _decompressed(request.stream(), encoding)
    else:
        message = f"Content-Encoding {encoding[:40]!r}: send gzip or deflate, or no compression"
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
                raise _invalid(encoding, "is damaged") from error
            # After a full piece, zlib may hold more output even if the whole part is consumed.
            part, is_full = unpacking.unconsumed_tail, len(piece) == _PIECE
            if piece:
                yield piece
                await asyncio.sleep(0)  # let other requests run
        if unpacking.unused_data:
            raise _invalid(encoding, "has data after its end")
    if not unpacking.eof:
        raise _invalid(encoding, "is cut off")


def _invalid(encoding: str, what: str) -> ApiError:
    return ApiError(400, "invalid_compression", f"the {encoding} body {what}: compress it again")

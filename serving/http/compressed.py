"""Decompresses request bodies (`Content-Encoding`) piece by piece.

A few kilobytes may expand to gigabytes, so no piece is longer than `_PIECE`, and the reader stops
when its limit is exceeded.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request

from serving.errors import ApiError

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

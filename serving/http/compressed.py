"""Request bodies that came compressed (`Content-Encoding`), decompressed piece by piece.

A few kilobytes may stand for gigabytes: no piece is longer than `_PIECE`, and whoever reads them
stops where its limit is exceeded.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request

from serving.errors import ApiError

_PIECE = 2**16
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}


def encoding_of(request: Request) -> str:
    """The content coding of a body, in lower case; "" for none."""
    stated = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    return "" if stated == "identity" else stated


def plain_only(request: Request) -> None:
    """Refuse a compressed body of lines, which has no limit on its length; ApiError 415."""
    if encoding := encoding_of(request):
        message = f"lines are read as they come: send them without Content-Encoding {encoding[:40]}"
        raise ApiError(415, "unknown_encoding", message)


async def plain_parts(request: Request) -> AsyncGenerator[bytes, None]:
    """The parts of a body, decompressed if it came compressed.

    Raises ApiError: 415 for another content coding, 400 for what is damaged or cut off.
    """
    encoding = encoding_of(request)
    if not encoding:
        parts: AsyncIterator[bytes] = request.stream()
    elif encoding in _WINDOW_BITS:
        parts = _decompressed(request.stream(), encoding)
    else:
        message = f"Content-Encoding {encoding[:40]!r}: send gzip or deflate, or none of them"
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
            # With a full piece more may wait inside, even where all of the part is consumed.
            part, is_full = unpacking.unconsumed_tail, len(piece) == _PIECE
            if piece:
                yield piece
                await asyncio.sleep(0)  # others have their turn
        if unpacking.unused_data:
            raise _invalid(encoding, "goes on after its end")
    if not unpacking.eof:
        raise _invalid(encoding, "is cut off")


def _invalid(encoding: str, what: str) -> ApiError:
    return ApiError(400, "invalid_compression", f"the {encoding} body {what}: compress it again")

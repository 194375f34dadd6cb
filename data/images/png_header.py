"""The size of a PNG from its first bytes: for a small one, Pillow's header costs more than pixels.

Only what says nothing but pixels is followed; for all else, such as texts, profiles and what EXIF
says, Pillow is asked (`data/images/decode.py`), whose limits count there.
"""

import struct
import zlib
from typing import NamedTuple

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Grey, RGB, palette, grey with alpha, RGB with alpha.
_COLOUR_TYPES, _WITH_ALPHA = frozenset({0, 2, 3, 4, 6}), frozenset({4, 6})
# A header's chunk is 13 bytes between its length, its name and its checksum.
_HEADER_END = 33
_PALETTE_BYTES = 3 * 256
# Of a few bytes each. Not tRNS: what is transparent by it, Pillow says.
_SKIPPED = frozenset({b"PLTE", b"bKGD", b"cHRM", b"gAMA", b"pHYs", b"sBIT", b"sRGB", b"tIME"})


class PngHeader(NamedTuple):
    """Pixels, and whether they have an alpha channel."""

    height: int
    width: int
    transparent: bool


def png_header(data: bytes) -> PngHeader | None:
    """The header of a PNG of 8 bits a channel; None where it is not plain."""
    if data[:16] != _SIGNATURE + b"\0\0\0\x0dIHDR" or len(data) < _HEADER_END:
        return None
    width, height, depth, colour, *methods, crc = struct.unpack_from(">IIBBBBBI", data, 16)
    if depth != 8 or colour not in _COLOUR_TYPES or any(methods) or not (width and height):
        return None
    if zlib.crc32(data[12:29]) != crc:
        return None
    return PngHeader(height, width, colour in _WITH_ALPHA) if _pixels_follow(data) else None


def _pixels_follow(data: bytes) -> bool:
    at = _HEADER_END
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IDAT":
            return True
        if name not in _SKIPPED or length > _PALETTE_BYTES:
            return False
        at += 12 + length
    return False

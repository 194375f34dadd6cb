"""The size of a JPEG or PNG from its first bytes: what a decoder's limits need, in a microsecond.

Only plain headers are followed, as libjpeg and libpng follow them. For all others, such as those
with text, profiles or EXIF, Pillow is asked (`data/images/decode.py`): for a small PNG its header
costs more than the pixels, for a JPEG a twentieth of decoding.
"""

import re
import struct
import zlib
from typing import NamedTuple

# SOF0 to SOF15, without DHT, JPG and DAC, which share their range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# A marker that has a length, or ends the image: no zero, TEM, restart or fill byte follows 0xFF.
_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
# DHT, DQT, DRI, APP0 to APP15, COM: skipped by their length.
_JPEG_SEGMENTS_SKIPPED = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Grey, RGB, palette, grey with alpha, RGB with alpha.
_PNG_COLOR_TYPES, _WITH_ALPHA = frozenset({0, 2, 3, 4, 6}), frozenset({4, 6})
# A header's chunk is 13 bytes between its length, its name and its checksum.
_PNG_HEADER_END = 33
_PALETTE_BYTES = 3 * 256
# Of a few bytes each. Not tRNS: what is transparent by it, Pillow says.
_PNG_CHUNKS_SKIPPED = frozenset(
    {b"PLTE", b"bKGD", b"cHRM", b"gAMA", b"pHYs", b"sBIT", b"sRGB", b"tIME"}
)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width), pixels, before any turn that EXIF asks for; None where it is not plain."""
    if data[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, at + 1)
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return (height, width) if height and width else None
        if marker not in _JPEG_SEGMENTS_SKIPPED or length < 2:
            return None
        at += 2 + length
    return None


def has_more_scans(data: bytes, most: int) -> bool:
    """Whether a JPEG has more than `most` scans: its decoder passes over the whole picture in each.

    A progressive one of a camera has about ten; a hundred bytes are enough for one that says
    nothing (libjpeg-turbo's report LJT-01-004). What follows the picture's end is not counted.
    """
    if data.count(b"\xff\xda") <= most:  # false ones, of a thumbnail or in a film behind it, too
        return False
    scans, at = 0, 2
    while (found := _MARKER.search(data, at)) is not None and found[1] != _END_OF_IMAGE:
        at = found.end()
        scans += found[1] == _START_OF_SCAN
        if scans > most:
            return True
        at += int.from_bytes(data[at : at + 2], "big")
    return False


class PngHeader(NamedTuple):
    """Pixels, and whether they have an alpha channel."""

    height: int
    width: int
    transparent: bool


def png_header(data: bytes) -> PngHeader | None:
    """The header of a PNG of 8 bits a channel; None where it is not plain."""
    if data[:16] != _PNG_SIGNATURE + b"\0\0\0\x0dIHDR" or len(data) < _PNG_HEADER_END:
        return None
    width, height, depth, colour, *methods, crc = struct.unpack_from(">IIBBBBBI", data, 16)
    if depth != 8 or colour not in _PNG_COLOR_TYPES or any(methods) or not (width and height):
        return None
    if zlib.crc32(data[12:29]) != crc:
        return None
    return PngHeader(height, width, colour in _WITH_ALPHA) if _pixels_follow(data) else None


def _pixels_follow(data: bytes) -> bool:
    at = _PNG_HEADER_END
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IDAT":
            return True
        if name not in _PNG_CHUNKS_SKIPPED or length > _PALETTE_BYTES:
            return False
        at += 12 + length
    return False

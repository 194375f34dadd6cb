"""The size of a JPEG from its first bytes: what a decoder's limits need, in a microsecond.

Only the plain sequence of segments is followed, as libjpeg follows it; for all else Pillow is asked
(`data/images/decode.py`), which takes as long as a twentieth of decoding.
"""

import struct

# SOF0 to SOF15, without DHT, JPG and DAC, which share their range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# DHT, DQT, DRI, APP0 to APP15, COM: skipped by their length.
_SKIPPED = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})


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
        if marker not in _SKIPPED or length < 2:
            return None
        at += 2 + length
    return None

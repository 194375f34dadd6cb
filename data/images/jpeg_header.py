"""The size of a JPEG from its first bytes: what a decoder's limits need, in a microsecond.

Only the plain sequence of segments is followed, as libjpeg follows it; for all else Pillow is asked
(`data/images/decode.py`), which takes as long as a twentieth of decoding.
"""

import re
import struct

# SOF0 to SOF15, without DHT, JPG and DAC, which share their range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# A marker that has a length, or ends the image: no zero, TEM, restart or fill byte follows 0xFF.
_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
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

"""Completes a JPEG whose end-of-image marker is missing although all of its pixels are present.

libjpeg fills missing data with zeros and reports this only on stderr, so a missing marker and
missing pixels must be distinguished here. The decoder ignores bytes that follow a complete scan,
but if pixels are missing, it decodes these bytes as pixel data. The pixels are therefore complete
if they do not depend on the bytes that are appended to the file.
"""

import io
import re
import struct

import numpy as np
from PIL.JpegImagePlugin import JpegImageFile

from data.images.headers import END_OF_IMAGE, MARKER, START_OF_SCAN, has_more_scans

MISSING_END_MARKER = "the end marker of the JPEG was missing and has been added"
_END = b"\xff" + END_OF_IMAGE
_SEQUENTIAL, _PROGRESSIVE = frozenset({b"\xc0", b"\xc1", b"\xc9"}), frozenset({b"\xc2", b"\xca"})
_COEFFICIENTS = 64
# Each of the up to 27 decodings below processes all pixels for each scan. Encoders write about ten.
_MAX_SCANS = 20
_DAMAGE = (SyntaxError, OSError, ValueError, EOFError, IndexError, OverflowError, struct.error)
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
# Random bytes, without 0xFF, which would begin a marker. One sequence may leave the pixels
# unchanged by chance, but not all eight.
_PROBES = [row.tobytes() for row in np.random.default_rng(0).integers(0, 255, (8, 1024), np.uint8)]


def lacks_end(data: bytes) -> bool:
    """Return whether the end marker of a JPEG is missing."""
    return not data.endswith(_END) and all(marker != END_OF_IMAGE for marker, _ in _segments(data))


def completed(data: bytes) -> bytes | None:
    """Return a JPEG whose end marker is missing with the marker added, or None if pixels are
    missing as well.

    Zeros at the end, with which some cameras and file systems pad files, are removed. JPEGs with
    more than 20 scans are not repaired.
    """
    if has_more_scans(data, _MAX_SCANS):
        return None
    body = data.rstrip(b"\0").removesuffix(b"\xff")
    if _is_complete(body):
        return body + _END
    # A scan may itself end with zeros. If one zero less also completes it, zeros were appended, and
    # they may stand in for missing data. A truncated file that was padded with exactly the number
    # of missing bytes cannot be distinguished from a complete one.
    is_whole = data.endswith(b"\0") and _is_complete(data) and not _is_complete(data[:-1])
    return data + _END if is_whole else None


def _is_complete(body: bytes) -> bool:
    if not _has_all_scans(body) or (plain := _pixels(body + _END)) is None:
        return False
    # A decoder that expects a restart marker skips all bytes before it.
    restart = bytes([0xFF, _next_restart(body)])
    probed = (_pixels(body + probe + restart + probe + _END) for probe in _PROBES)
    return all(pixels is not None and np.array_equal(pixels, plain) for pixels in probed)


def _next_restart(body: bytes) -> int:
    found = _RESTART.findall(body)
    return 0xD0 + ((found[-1][1] + 1) % 8 if found else 0)


def _pixels(data: bytes) -> np.ndarray | None:
    # Pillow is used instead of OpenCV because OpenCV prints libjpeg's warnings.
    try:
        with JpegImageFile(io.BytesIO(data)) as image:
            return np.asarray(image)
    except _DAMAGE:
        return None


def _segments(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the marker and content of each segment up to the end of the image."""
    found, at = [], 2
    while (match := MARKER.search(data, at)) is not None:
        marker, start = match[1], match.end()
        length = int.from_bytes(data[start : start + 2], "big")
        found.append((marker, data[start + 2 : start + length]))
        if marker == END_OF_IMAGE:
            break
        at = start + length
    return found


def _has_all_scans(data: bytes) -> bool:
    """Return whether the scans cover all bits of all coefficients of all components.

    A progressive JPEG that was truncated between two scans can be decoded, but not completely.
    """
    missing: dict[int, np.ndarray] = {}  # component -> number of missing bits of each coefficient
    progressive = False
    for marker, content in _segments(data):
        if marker in _SEQUENTIAL | _PROGRESSIVE and len(content) > 6:
            progressive = marker in _PROGRESSIVE
            missing = {component: np.full(_COEFFICIENTS, 16) for component in content[6::3]}
        elif marker == START_OF_SCAN and content:
            num = content[0]
            if len(content) < 4 + 2 * num:
                return False
            first, last, bits = content[1 + 2 * num : 4 + 2 * num]
            span = slice(first, last + 1) if progressive else slice(None)
            for component in content[1 : 1 + 2 * num : 2]:
                if component not in missing:
                    return False
                missing[component][span] = bits & 15 if progressive else 0
    return bool(missing) and not any(bits.any() for bits in missing.values())

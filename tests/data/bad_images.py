"""Images as files, assembled by hand where libraries cannot write them."""

import io
import struct
import zlib

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int, height: int, *, depth: int = 8, color: int = 0, extra: bytes = b"", rows: int = 0
) -> bytes:
    """Return an all-zero PNG with only `rows` of its rows. The chunks `extra` precede the image
    data.
    """
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    row_bytes = 1 + (width * channels * depth + 7) // 8
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(b"\0" * row_bytes) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )

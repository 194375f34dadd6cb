"""Unusual and malformed image files, assembled by hand where libraries cannot write them."""

import io
import struct
import zlib

from PIL import Image, PngImagePlugin


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


def gif(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    """Return a GIF whose frame may differ in size from its logical screen. The frame has data for a
    single pixel.
    """
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00;"


def webp_canvas(width: int, height: int) -> bytes:
    """Return a 16 x 16 pixel WebP whose header declares a different canvas size."""
    inner = encoded(Image.new("RGB", (16, 16), "red"), "webp", lossless=True)[12:]
    extended = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + extended + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int) -> bytes:
    """Return a BMP without pixels."""
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    start = 14 + len(header)
    return b"BM" + struct.pack("<IHHI", start, 0, 0, start) + header


def jpeg_segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def with_segment(jpeg: bytes, marker: int, data: bytes) -> bytes:
    """Return a JPEG with an additional segment at the start of the file."""
    return jpeg[:2] + jpeg_segment(marker, data) + jpeg[2:]


def jpeg_of_scans(width: int, height: int, scans: int) -> bytes:
    """Return a small progressive JPEG that makes a decoder process the entire image `scans` times.
    Each scan consists of runs of 32,767 empty blocks.
    """
    blocks = ((width + 7) // 8) * ((height + 7) // 8)
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    tables = jpeg_segment(0xDB, b"\0" + b"\x01" * 64)
    # Each Huffman table contains a single one-bit code. In the DC table it means a difference of
    # zero; in the AC table, a run of 2^14 blocks plus the number in the next 14 bits.
    tables += jpeg_segment(0xC4, b"\x00" + b"\x01" + b"\0" * 15 + b"\x00")
    tables += jpeg_segment(0xC4, b"\x10" + b"\x01" + b"\0" * 15 + b"\xe0")
    first = jpeg_segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + b"\0" * (blocks // 8 + 1)
    bits = "".join("0" + "1" * 14 for _ in range(-(-blocks // 32767)))
    bits += "1" * (-len(bits) % 8)
    run = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    again = jpeg_segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + run
    return b"\xff\xd8" + tables + jpeg_segment(0xC2, frame) + first + again * scans + b"\xff\xd9"


def png_text(text_bytes: int) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "x" * text_bytes, zip=True)
    return encoded(Image.new("L", (16, 16)), "png", pnginfo=info)

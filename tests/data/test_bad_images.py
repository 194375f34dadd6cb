"""Malicious and unusual images: each is decoded or rejected without excessive memory use."""

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from benchmarks.timing import resident, restart_high_water_mark
from data.images.decode import decode
from tests.data.bad_images import chunk, encoded, png


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


MAX_PIXELS = 1_500_000
# Before an image with transparency is blended with a background, it is copied several times at four
# bytes per pixel.
BYTES_PER_PIXEL = 26
SPARE_BYTES = 24 * 2**20
GRAY = Image.radial_gradient("L").resize((64, 48))
PNG, JPEG = encoded(GRAY, "png"), encoded(GRAY, "jpeg")
LARGE_JPEG = JPEG.replace(b"\x00\x30\x00\x40", b"\x4e\x20\x4e\x20", 1)  # 20,000 x 20,000
ICC_PART = jpeg_segment(0xE2, b"ICC_PROFILE\0\x01\xff" + b"x" * 60_000)
TEXT_CHUNK = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 900_000))
NOISE = np.random.default_rng(0).bytes(5000)


def is_decoded(file: bytes) -> bool:
    """Return whether an image is decoded or else rejected. Fails if this uses more memory than
    allowed."""
    before = restart_high_water_mark()
    try:
        decode(file, 1, MAX_PIXELS)
    except ValueError:
        found = False
    else:
        found = True
    took = resident("VmHWM") - before
    assert took < MAX_PIXELS * BYTES_PER_PIXEL + SPARE_BYTES + 4 * len(file), took
    return found


def animated(kind: str, mode: str = "L", frames: int = 1500) -> bytes:
    shades = [Image.new(mode, (16, 16), (n % 251,) * len(mode)) for n in range(frames)]
    return encoded(shades[0], kind, save_all=True, append_images=shades[1:])


def shades(mode: str, size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.radial_gradient("L").resize(size).convert(mode)


@pytest.mark.parametrize(
    "make",
    [
        lambda: encoded(shades("CMYK"), "jpeg"),
        lambda: encoded(GRAY, "jpeg", progressive=True),
        lambda: encoded(GRAY.convert("I;16"), "png"),
        lambda: png(64, 48, depth=16, color=6, rows=48),
        lambda: png(64, 48, depth=1, color=0, rows=48),
        lambda: encoded(shades("P"), "png", transparency=3),
        lambda: encoded(shades("RGBA"), "webp"),
        lambda: encoded(shades("1"), "bmp"),
        lambda: animated("gif"),
        lambda: animated("png", frames=300),
        lambda: animated("webp", "RGBA", frames=300),
        lambda: with_segment(JPEG, 0xE1, b"Exif\0\0" + b"\xff" * 65_000),
        lambda: with_segment(JPEG, 0xE1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01" * 30_000),
        lambda: JPEG[:2] + ICC_PART * 255 + JPEG[2:],
        lambda: JPEG[:2] + jpeg_segment(0xFE, b"") * 100_000 + JPEG[2:],
        lambda: jpeg_of_scans(64, 64, 50),
        lambda: png(16, 16, rows=16, extra=chunk(b"tEXt", b"a\0b") * 20_000),
        lambda: png(1200, 1200, depth=16, color=6, rows=1200),
        lambda: encoded(shades("CMYK", (1200, 1200)), "jpeg", progressive=True),
    ],
)
def test_unusual_images_are_decoded(make: Callable[[], bytes]) -> None:
    assert is_decoded(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: png(20_000, 20_000),
        lambda: png(2**31 - 1, 2**31 - 1),
        lambda: png(0, 16),
        lambda: png(20_000, 75, rows=75),  # a thin strip
        lambda: encoded(Image.new("L", (1300, 1300)), "png"),
        lambda: encoded(Image.new("L", (1300, 1300)), "jpeg"),
        lambda: encoded(Image.new("L", (1300, 1300)), "jpeg", progressive=True),
        lambda: encoded(Image.new("L", (1300, 1300)), "gif"),
        lambda: encoded(Image.new("RGB", (1300, 1300)), "webp"),
        lambda: encoded(Image.new("L", (1300, 1300)), "bmp"),
        lambda: LARGE_JPEG,
        lambda: LARGE_JPEG[:2] + b"\xff" + LARGE_JPEG[2:],  # a fill byte, which libjpeg accepts
        lambda: jpeg_of_scans(64, 64, 150),
        lambda: jpeg_of_scans(64, 64, 150).replace(b"\xff\xda", b"\xff\x01\xff\xda"),
        lambda: gif((65_535, 65_535), (16, 16)),
        lambda: gif((16, 16), (65_535, 65_535)),
        lambda: webp_canvas(16_384, 16_384),
        lambda: webp_canvas(17, 17),
        lambda: bmp(30_000, 30_000),
        lambda: bmp(-16, 16),
        lambda: bmp(16, -(2**31)),
        lambda: png(16, 16, rows=16, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 10**8))),
        lambda: png(16, 16, rows=16, extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * 10**8))),
        lambda: png(16, 16, rows=16, extra=TEXT_CHUNK * 200),
    ],
)
def test_decompression_bombs_are_rejected(make: Callable[[], bytes]) -> None:
    assert not is_decoded(make())


@pytest.mark.parametrize(
    "file",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://a.b/c'/></svg>",
        b"%PDF-1.4\n" + JPEG,
        b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) run",
        b"PK\x03\x04" + PNG,
        b"GIF89a/*" + b"\0" * 20 + b"*/=1;alert(1)",
        b"II*\0\x08\0\0\0" + b"\0" * 100,
        b"\0\0\0\x1cftypavif" + b"\0" * 100,
        b"RIFF\xff\xff\xff\xffWAVEfmt ",
        b"RIFF",
        b"BM",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF87a",
        b"\0",
        PNG.replace(b"IHDR", b"ihdr"),
        PNG[:8] + PNG[33:],
        PNG[:33] + PNG[8:33] + PNG[33:40],
    ],
)
def test_a_file_in_another_format_is_rejected(file: bytes) -> None:
    assert not is_decoded(file)


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp"])
@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_an_image_truncated_at_any_byte_is_decoded_or_rejected(kind: str, mode: str) -> None:
    noise = Image.frombytes(mode, (24, 20), NOISE[: 480 * len(mode)])
    file = encoded(noise.convert("RGB") if kind == "jpeg" else noise, kind)
    for length in {*range(1, 64), *range(64, len(file), max(1, len(file) // 30))}:
        is_decoded(file[:length])  # any other exception is a bug
    assert is_decoded(file)
    assert not is_decoded(file[: int(len(file) * (0.3 if kind == "gif" else 0.9))])

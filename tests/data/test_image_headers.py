"""The headers of JPEG and PNG are read without Pillow."""

import struct

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from data.images.decode import decode
from data.images.headers import is_jpeg_without_end, jpeg_header, png_header
from data.sources.packing import packed
from tests.data.bad_images import encoded

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)


def jpeg(**options: object) -> bytes:
    return encoded(Image.fromarray(NOISE[:, :, :3]), "jpeg", **options)


def size(data: bytes) -> tuple[int, int]:
    header = jpeg_header(data)
    assert header is not None
    return header.height, header.width


def exif() -> Image.Exif:
    """Return EXIF data with a 90-degree rotation and a description that contains JPEG markers."""
    tags = Image.Exif()
    tags[0x0112] = 6
    tags[0x010E] = "\xff\xc0" * 200
    return tags


@pytest.mark.parametrize("options", [{}, {"comment": b"\xff\xc0\x00\x11\x08"}, {"exif": exif()}])
def test_the_size_ignores_the_exif_rotation(options: dict) -> None:
    data = jpeg(**options)
    assert size(data) == (40, 60)
    assert decode(data, 3).shape == ((60, 40, 3) if "exif" in options else (40, 60, 3))


def test_a_file_without_a_size_has_no_header() -> None:
    data = jpeg()
    frame = data.index(b"\xff\xc0")
    empty = data[: frame + 5] + struct.pack(">HH", 0, 60) + data[frame + 9 :]
    for case in (data[:frame], data[: frame + 8], empty, b"", b"\xff\xd8", b"\x89PNG" + data):
        assert jpeg_header(case) is None


def test_a_forged_frame_after_fill_bytes_is_ignored() -> None:
    """A fill byte is not a marker. A parser that took it for one would go on to read a comment."""
    data = jpeg()
    comments = b"\xff\xff\xfe\x00\x10" + bytes(14) + b"\xff\xfe\xff\xf0" + bytes(0xFFEE)
    forged = bytearray(data[:2] + comments + data[2:])
    struct.pack_into(">HHBHH", forged, 2 + 2 + 0xFE00, 0xFFC0, 17, 8, 1, 1)
    assert decode(bytes(forged), 3).shape == (40, 60, 3)
    assert size(bytes(forged)) == (40, 60)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"\xff\xd9" * 9}])
def test_a_jpeg_without_an_end_marker_is_truncated(options: dict) -> None:
    data = jpeg(**options)
    assert not is_jpeg_without_end(data + b"video")
    packed(data + b"video", short_side=None, quality=90)
    for cut in (data[:-2], data[:-200], data[:-200] + bytes(200), data[:-1]):
        with pytest.raises(ValueError, match="truncated"):
            packed(cut, short_side=None, quality=90)
        if not cut.endswith(b"\0"):
            with pytest.raises(ValueError, match="damaged"):
                decode(cut, 3)


def png(mode: str = "RGB", **options: object) -> bytes:
    image = Image.fromarray(NOISE if mode == "RGBA" else NOISE[:, :, :3])
    return encoded(image.convert(mode), "png", **options)


def described() -> PngImagePlugin.PngInfo:
    """Return a text chunk. Only Pillow parses a PNG that contains one."""
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Title", "noise", zip=True)
    return texts


@pytest.mark.parametrize("data", [png("P", transparency=3), png(pnginfo=described()), png()[:25]])
def test_only_pillow_reads_transparency_texts_and_incomplete_headers(data: bytes) -> None:
    assert png_header(data) is None


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "LA", "RGBA", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_do_not_depend_on_which_parser_reads_the_header(mode: str, channels: int) -> None:
    """Compare with a copy that has a text chunk, which makes Pillow parse the header."""
    plain, by_pillow = png(mode), png(mode, pnginfo=described())
    assert png_header(plain) == (40, 60, mode.endswith("A"))
    assert np.array_equal(decode(plain, channels), decode(by_pillow, channels))

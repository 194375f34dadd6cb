"""Parsing a PNG header without Pillow gives the same result as Pillow, or None."""

import io

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from data.images.decode import decode
from data.images.headers import png_header

_MODES = {"L": False, "RGB": False, "P": False, "LA": True, "RGBA": True}


def png(mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(noise)
    image = image if mode == "RGBA" else image.convert("RGB")
    image.convert(mode).save(buffer, "PNG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", _MODES)
def test_size_and_alpha_match_the_image(mode: str) -> None:
    assert png_header(png(mode)) == (40, 60, _MODES[mode])


def described() -> PngImagePlugin.PngInfo:
    """Return a text chunk. Only Pillow parses a PNG that contains one."""
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Title", "noise", zip=True)
    return texts


@pytest.mark.parametrize("data", [png("P", transparency=3), png(pnginfo=described()), png()[:25]])
def test_only_pillow_reads_transparency_texts_and_incomplete_headers(data: bytes) -> None:
    assert png_header(data) is None


@pytest.mark.parametrize("mode", [*_MODES, "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_do_not_depend_on_which_parser_reads_the_header(mode: str, channels: int) -> None:
    """Compare with a copy that has a text chunk, which makes Pillow parse the header."""
    plain, by_pillow = png(mode), png(mode, pnginfo=described())
    assert np.array_equal(decode(plain, channels), decode(by_pillow, channels))

"""Renders characters as small gray images, in the font faces that ship with matplotlib.

`data/sources/glyphs.py` selects the characters that form a class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

cv2.setNumThreads(0)

# The excluded fonts: LastResort draws a box for every character, and the other three map letter
# codes to symbols.
_LEFT_OUT = {"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"}
# Glyphs are rendered larger by this factor and then scaled down by averaging.
_OVERSAMPLING = 3
_EM = 0.72  # fraction of the image's side
_BASELINE = 0.74  # from the top, fraction of the image's side
_MARGIN = 1 / 24  # kept free on each side, fraction of the image's side


def font_folder() -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def face_characters() -> dict[str, frozenset[int]]:
    """Map each face name to the code points that it supports, sorted by name.

    TeX's Computer Modern faces use some ASCII and Latin-1 codes for other glyphs; for example, the
    backslash code is an opening quote. In these faces, a character counts as supported only if its
    glyph has the same name as in DejaVu Sans.
    """
    fonts = {
        path.stem: FT2Font(str(path))
        for path in sorted(font_folder().glob("*.ttf"))
        if path.stem not in _LEFT_OUT
    }
    names = _glyph_names(fonts["DejaVuSans"])
    faces = {}
    for face, font in fonts.items():
        own = _glyph_names(font)
        if face.startswith("cm"):
            own = {code: name for code, name in own.items() if names.get(code) == name}
        faces[face] = frozenset(own)
    return faces


def _glyph_names(font: FT2Font) -> dict[int, str]:
    return {code: font.get_glyph_name(glyph) for code, glyph in font.get_charmap().items()}


@dataclass(frozen=True)
class Glyph:
    """The ink of a character, oversampled.

    ink: the pixels, uint8 [h, w], 255 for ink. top: the position of the top row of pixels relative
    to the baseline; negative if it is above.
    """

    ink: np.ndarray
    top: int


@dataclass(frozen=True)
class Distortion:
    """A mild distortion of a glyph.

    Lengths are fractions of the image's side, and the angle is in radians.
    """

    angle: float
    scale_x: float
    scale_y: float
    shear: float
    shift_x: float
    shift_y: float
    blur: float
    weight: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Distortion":
        return cls(
            angle=math.radians(rng.uniform(-7, 7)),
            scale_x=rng.uniform(0.85, 1.1),
            scale_y=rng.uniform(0.85, 1.1),
            shear=rng.uniform(-0.12, 0.12),
            shift_x=rng.uniform(-0.05, 0.05),
            shift_y=rng.uniform(-0.05, 0.05),
            blur=rng.uniform(0.0, 0.025),
            weight=rng.uniform(0.8, 1.3),
        )


PLAIN = Distortion(0, 1, 1, 0, 0, 0, 0, 1)


class Pen:
    """Draws characters as images uint8 [size, size], dark on white.

    A pen must not be sent to other processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._side = size * _OVERSAMPLING
        self._fonts: dict[str, ImageFont.FreeTypeFont] = {}

    def glyph(self, face: str, code: int) -> Glyph | None:
        """Return the shape of the character, or None if it is blank in this face."""
        if face not in self._fonts:
            self._fonts[face] = ImageFont.truetype(
                str(font_folder() / f"{face}.ttf"),
                round(_EM * self._side),
                layout_engine=ImageFont.Layout.BASIC,
            )
        font = self._fonts[face]
        left, top, right, bottom = map(int, font.getbbox(chr(code), anchor="ls"))
        if right <= left or bottom <= top:
            return None
        canvas = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(canvas).text((-left, -top), chr(code), fill=255, font=font, anchor="ls")
        box = canvas.getbbox()
        if box is None:
            return None
        return Glyph(np.asarray(canvas.crop(box)), top + box[1])

    def draw(self, glyph: Glyph, distortion: Distortion = PLAIN) -> np.ndarray:
        """Draw the glyph on its baseline, centered horizontally.

        The glyph is shrunk or moved only if it would be clipped.
        """
        matrix = self._affine_map(glyph, distortion)
        ink = cv2.warpAffine(glyph.ink, matrix, (self._side, self._side), flags=cv2.INTER_LINEAR)
        if (sigma := distortion.blur * self._side) > 0.3:
            ink = cv2.GaussianBlur(ink, (0, 0), sigma)
        ink = cv2.resize(ink, (self.size, self.size), interpolation=cv2.INTER_AREA)
        return 255 - cv2.convertScaleAbs(ink, alpha=distortion.weight)

    def _affine_map(self, glyph: Glyph, change: Distortion) -> np.ndarray:
        """Return the affine map [2, 3] from the glyph's pixels to the canvas."""
        height, width = glyph.ink.shape
        cos, sin = math.cos(change.angle), math.sin(change.angle)
        # rotation @ shear @ scale
        xx, yx = cos * change.scale_x, sin * change.scale_x
        xy = (cos * change.shear - sin) * change.scale_y
        yy = (sin * change.shear + cos) * change.scale_y
        # Rotate around the middle of the line, so that the glyph stays on its line.
        middle_x, middle_y = width / 2, self._side * (0.5 - _BASELINE) - glyph.top
        corners = [(x - middle_x, y - middle_y) for x in (0, width) for y in (0, height)]
        along = [xx * x + xy * y for x, y in corners]
        down = [yx * x + yy * y for x, y in corners]
        edge = self._side * _MARGIN
        room = self._side - 2 * edge
        shrink = min(1.0, room / (max(along) - min(along)), room / (max(down) - min(down)))
        xx, xy, yx, yy = (factor * shrink for factor in (xx, xy, yx, yy))
        center_x = _inside(self._side * (0.5 + change.shift_x), along, shrink, edge, room)
        center_y = _inside(self._side * (0.5 + change.shift_y), down, shrink, edge, room)
        # OpenCV measures from pixel centers, but the boxes above are measured from pixel corners.
        middle_x, middle_y = middle_x - 0.5, middle_y - 0.5
        offset_x = center_x - 0.5 - xx * middle_x - xy * middle_y
        offset_y = center_y - 0.5 - yx * middle_x - yy * middle_y
        return np.array([[xx, xy, offset_x], [yx, yy, offset_y]])


def _inside(
    center: float, corners: Sequence[float], shrink: float, edge: float, room: float
) -> float:
    """Move `center` so that the shrunk corners around it lie between `edge` and `edge + room`."""
    low = edge - min(corners) * shrink
    high = edge + room - max(corners) * shrink
    return min(max(center, low), high)

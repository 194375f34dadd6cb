"""A contact sheet: samples of a split in a grid, each with its class name below it.

For the same split, the image is pixel-identical on machines with the same fonts.
"""

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from matplotlib.font_manager import findSystemFonts
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from data.images.decode import decode
from data.images.fonts import font_folder
from data.inspection.contents import examples
from data.shards.split import Split

_TILE = 128
_GAP = 10
_LINE = 16
_FONT_SIZE = 12
_LINES = 3
_TITLE = 28
_PAPER, _GROUND, _INK, _FAINT = "white", (238, 238, 238), (20, 20, 20), (120, 120, 120)
_FACES = ("DejaVuSans", "STIXGeneral", "DejaVuSerif")


def contact_sheet(split: Split, number: int) -> Image.Image:
    """Draw up to `number` examples from a split of images, at most 8 per row."""
    chosen = examples(split, number)
    columns = min(8, len(chosen))
    rows = -(-len(chosen) // columns)
    step_x, step_y = _TILE + _GAP, _TILE + _LINES * _LINE + _GAP
    size = (_GAP + columns * step_x, _TITLE + _GAP + rows * step_y)
    sheet = Image.new("RGB", size, _PAPER)
    pen = _Pen(ImageDraw.Draw(sheet))
    title = f"{split.folder.name}, {split.name}: {len(chosen)} of {len(split):,} samples"
    pen.lines(title, _GAP, _GAP, size[0] - 2 * _GAP, lines=1)
    for position, index in enumerate(chosen):
        left = _GAP + position % columns * step_x
        top = _TITLE + _GAP + position // columns * step_y
        sheet.paste(_GROUND, (left, top, left + _TILE, top + _TILE))
        name = _paste(sheet, split, index, left, top)
        pen.lines(name or "damaged image", left, top + _TILE + 2, _TILE, lines=_LINES)
    return sheet


def _paste(sheet: Image.Image, split: Split, index: int, left: int, top: int) -> str | None:
    """Paste the entire sample into its tile and return its class name, or None if the sample is
    damaged.

    Small images are enlarged without smoothing, so that individual pixels stay visible.
    """
    try:
        data, _, label = split.read(index)
        image = Image.fromarray(decode(data, 3))
    except ValueError:
        draw = ImageDraw.Draw(sheet)
        draw.line((left, top, left + _TILE, top + _TILE), fill=_FAINT)
        draw.line((left, top + _TILE, left + _TILE, top), fill=_FAINT)
        return None
    scale = _TILE / max(image.size)
    method = Image.Resampling.BOX if scale > 1 else Image.Resampling.LANCZOS
    width, height = (max(1, round(side * scale)) for side in image.size)
    small = image.resize((width, height), method)
    sheet.paste(small, (left + (_TILE - width) // 2, top + (_TILE - height) // 2))
    return split.classes[label].name


class _Pen:
    """Draws names in any script. Each character is drawn in the first font that contains it."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw
        self._faces = _Faces()

    def lines(self, text: str, left: float, top: float, width: float, *, lines: int) -> None:
        """Draw `text` starting at the top left corner, wrapped at `width` and truncated with an
        ellipsis.
        """
        rest = self._faces.drawable(text)
        for line in range(lines):
            rest = rest.lstrip()
            fits = self._prefix(rest, width)
            if fits == len(rest):
                shown, rest = rest, ""
            elif line == lines - 1:
                shown = rest[: self._prefix(rest, width - self._width("…"))] + "…"
            else:
                breaks = [
                    n for n in range(1, fits + 1) if rest[n : n + 1] == " " or rest[n - 1] in "_-/"
                ]
                at = max(breaks, default=fits)
                shown, rest = rest[:at], rest[at:]
            x = left
            for font, run in self._runs(shown):
                self._draw.text((x, top + line * _LINE), run, font=font, fill=_INK)
                x += font.getlength(run)

    def _prefix(self, text: str, width: float) -> int:
        """Return the number of characters of `text`, at least one, that fit in `width`."""
        fits = (n for n in range(len(text), 0, -1) if self._width(text[:n]) <= width)
        return next(fits, min(1, len(text)))

    def _width(self, text: str) -> float:
        return sum(font.getlength(run) for font, run in self._runs(text))

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        for font, chars in groupby(text, self._faces.font_of):
            assert font is not None
            yield font, "".join(chars)


class _Faces:
    """The fonts that matplotlib ships, followed by the system fonts. Each font is opened when it is
    first needed.
    """

    def __init__(self) -> None:
        shipped = {path.stem: path for path in sorted(font_folder().glob("*.ttf"))}
        self._waiting = [shipped[face] for face in _FACES]
        self._system = False
        self._open: list[tuple[ImageFont.FreeTypeFont, frozenset[int]]] = []
        self._found: dict[str, ImageFont.FreeTypeFont | None] = {}

    def font_of(self, char: str) -> ImageFont.FreeTypeFont | None:
        """Return the first font that contains `char`, or None."""
        if char not in self._found:
            self._found[char] = next(
                (font for font, codes in self._all() if ord(char) in codes), None
            )
        return self._found[char]

    def drawable(self, text: str) -> str:
        """Return `text` on one line, with U+… for characters that are not in any font.

        Format characters and marks that are not in any font are dropped.
        """
        parts = []
        for char in " ".join(text.split()):
            if self.font_of(char) is not None and char.isprintable():
                parts.append(char)
            elif unicodedata.category(char) not in ("Cf", "Mn"):
                parts.append(f" U+{ord(char):04X} ")
        return " ".join("".join(parts).split())

    def _all(self) -> Iterator[tuple[ImageFont.FreeTypeFont, frozenset[int]]]:
        yield from self._open
        while self._waiting or not self._system:
            if not self._waiting:
                self._system = True
                self._waiting = [Path(path) for path in sorted(findSystemFonts())]
                continue
            path = self._waiting.pop(0)
            try:
                codes = frozenset(FT2Font(str(path)).get_charmap())
                face = (ImageFont.truetype(str(path), _FONT_SIZE), codes)
            except (OSError, RuntimeError):  # a bitmap font of a different size, or a damaged font
                continue
            self._open.append(face)
            yield face

"""What `kway shard show` shows of a folder of shards: examples, as texts or in a contact sheet.

Examples are deterministic: the first samples of classes that are evenly spaced in the class list.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from data.images.decode import decode
from data.images.fonts import font_folder
from data.messages import printable
from data.shards.split import Split

_TILE, _GAP, _LINE = 128, 10, 16
_GROUND, _INK, _FAINT = (238, 238, 238), (20, 20, 20), (120, 120, 120)


def examples(split: Split, number: int) -> list[int]:
    """Return up to `number` samples of a split, in class-list order.

    If there are more than `number` classes, the result contains one sample of each of `number`
    classes. Otherwise, it contains the same number of samples of each class. With sets of labels, a
    sample is an example of one of its classes.
    """
    present = np.flatnonzero(split.class_counts())
    chosen = present[
        np.linspace(0, len(present) - 1, min(number, len(present))).round().astype(int)
    ]
    each = max(1, number // max(1, len(chosen)))
    found = [i for label in chosen for i in split.samples_of_class(label)[:each].tolist()]
    return list(dict.fromkeys(found))


def texts(split: Split, number: int) -> Iterator[tuple[str, str]]:
    """Yield (class names, text) for each example. Invalid UTF-8 is shown as U+FFFD."""
    for index in examples(split, number):
        try:
            data, _, label = split.read(index)
        except ValueError as error:
            yield "damaged", str(error)
            continue
        yield _names(split, label), data.decode("utf-8", "replace")


def contact_sheet(split: Split, number: int) -> Image.Image:
    """Draw up to `number` examples from a split of images, at most 8 per row.

    The image is the same for the same shards. Long names are cut.
    """
    chosen = examples(split, number)
    columns = min(8, len(chosen))
    rows = -(-len(chosen) // columns)
    size = (_GAP + columns * (_TILE + _GAP), _LINE + _GAP + rows * (_TILE + _LINE + _GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(str(font_folder() / "DejaVuSans.ttf"), 12)
    folder = split.parts[0].folder
    name = folder.resolve().name if isinstance(folder, Path) else folder.rpartition("/")[2]
    title = f"{name}, {split.name}: {len(chosen)} of {len(split):,} samples"
    draw.text((_GAP, 4), printable(title), font=font, fill=_INK)
    for position, index in enumerate(chosen):
        left = _GAP + position % columns * (_TILE + _GAP)
        top = _LINE + _GAP + position // columns * (_TILE + _LINE + _GAP)
        sheet.paste(_GROUND, (left, top, left + _TILE, top + _TILE))
        name = printable(_paste(sheet, split, index, left, top))
        while font.getlength(name) > _TILE:
            name = f"{name[:-2]}…"
        draw.text((left, top + _TILE), name, font=font, fill=_INK)
    return sheet


def _paste(sheet: Image.Image, split: Split, index: int, left: int, top: int) -> str:
    """Paste a whole sample into its tile, and return its class names. Damage is crossed out.

    Small images are enlarged without smoothing, so that individual pixels stay visible.
    """
    try:
        data, _, label = split.read(index)
        image = Image.fromarray(decode(data, 3))
    except ValueError:
        draw = ImageDraw.Draw(sheet)
        draw.line((left, top, left + _TILE, top + _TILE), fill=_FAINT)
        draw.line((left, top + _TILE, left + _TILE, top), fill=_FAINT)
        return "damaged image"
    method = Image.Resampling.BOX if max(image.size) < _TILE else Image.Resampling.LANCZOS
    sheet.paste(ImageOps.pad(image, (_TILE, _TILE), method, _GROUND), (left, top))
    return _names(split, label)


def _names(split: Split, label: int | np.ndarray) -> str:
    """Return the name of a label, or the names of a set of labels."""
    return ", ".join(split.classes[one].name for one in np.atleast_1d(label).tolist())

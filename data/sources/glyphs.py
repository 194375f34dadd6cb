"""Characters drawn with the fonts that matplotlib ships: thousands of classes without a download.

There is one class for each character, or for each group of characters that look the same. The
samples of a class are drawings in different font faces, with mild distortions. Some styles are held
out for the test split. `data/images/fonts.py` draws the characters.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
from fontTools.unicodedata import block
from pydantic import Field
from pydantic.dataclasses import dataclass
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data.classes.class_list import ClassInfo
from data.images.fonts import PLAIN, Distortion, Pen, face_characters
from data.option import Option
from data.shards.hierarchy import PATH, join_path
from data.sources.packing import lossless
from data.sources.source import STRICT, Sample, Source
from data.text.name_vectors import name_vectors, split_words

MIN_FACES = 8
# One style of each family is held out from training. Every class has at least one drawing in these
# faces.
TEST_FACES = (
    "DejaVuSans-BoldOblique",
    "DejaVuSerif-Italic",
    "DejaVuSansMono-Bold",
    "STIXGeneralBol",
    "cmtt10",
)
_LOOK = 32  # image size for comparing characters, independent of `size`

# The kinds of characters, by Unicode category or by the first letter of the category.
_KINDS = {
    "Lu": "capital letters",
    "Ll": "small letters",
    "L": "other letters",
    "M": "marks",
    "N": "numbers",
    "P": "punctuation",
    "S": "symbols",
}

Drawings = dict[int, dict[str, bytes]]  # code point -> face -> its image


class _Task(NamedTuple):
    label: int
    code: int
    face: str
    variant: int  # -1 if there is no distortion


class _GlyphClass(NamedTuple):
    codes: tuple[int, ...]
    faces: dict[str, int]  # face -> the first of `codes` that the face contains


@dataclass(frozen=True, config=STRICT)
class Glyphs(Source):
    """Characters drawn with the fonts that matplotlib ships. No download is required.

    A class is a character that at least 8 font faces contain, or a group of characters that look
    the same. Training images are distorted, but test images are not. There is one test image per
    class and held-out face. A character may look the same in several faces. A test image that is
    identical to the drawing in a training face is excluded, unless the class has no other test
    image. This exception applies to 5% of the first 1,000 classes (box-drawing characters and
    arrows) and 22% of all classes (these and Braille).
    """

    kind = "glyphs"
    modality = "image"
    reads = "the fonts in the matplotlib package"
    held_out = "one style of each font family"

    classes_limit: Annotated[int | None, Option("--classes")] = Field(
        default=None,
        ge=2,
        le=1_000_000,
        description="maximum number of classes (those with the most faces are kept); default: all",
    )
    samples: int = Field(
        default=3, ge=1, le=10_000, description="number of training images per class and font face"
    )
    size: int = Field(default=32, ge=8, le=512, description="side length of the images in pixels")
    seed: int = Field(default=0, ge=0, lt=2**63, description="random seed for the distortions")

    def parameters(self) -> dict[str, Any]:
        return {
            "classes": self.classes_limit,
            "samples": self.samples,
            "size": self.size,
            "seed": self.seed,
            "confusables": "merge",  # an option of earlier versions, whose shards are still resumed
            # The version of the package determines the fonts.
            "matplotlib": matplotlib.__version__,
        }

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(
            ClassInfo(
                name=unicodedata.name(chr(group.codes[0])),
                attributes={
                    "characters": "".join(map(chr, group.codes)),
                    "unicode_name": " / ".join(unicodedata.name(chr(c)) for c in group.codes),
                    PATH: _path(chr(group.codes[0])),
                },
            )
            for group in self._groups
        )

    def label_vectors(self) -> np.ndarray:
        words = []
        for group in self._groups:
            words.append(
                [word for code in group.codes for word in split_words(unicodedata.name(chr(code)))]
                + sorted({f"block {block(chr(code))}" for code in group.codes})
            )
        return name_vectors(words)

    def splits(self) -> dict[str, Sequence[_Task]]:
        train = [
            _Task(label, code, face, variant)
            for label, group in enumerate(self._groups)
            for face, code in group.faces.items()
            if face not in TEST_FACES
            for variant in range(self.samples)
        ]
        test = [
            _Task(label, group.faces[face], face, -1)
            for label, group in enumerate(self._groups)
            for face in self._held_out(group)
        ]
        return {"train": train, "test": test}

    def render(self, task: _Task) -> Sample:
        glyph = self._pen.glyph(task.face, task.code)
        assert glyph is not None
        change = PLAIN
        key = f"{task.code:04x}-{task.face}"
        if task.variant >= 0:
            # The key is the character, not its class, so that --classes does not affect the images.
            words = [0, task.code, crc32(task.face.encode()), task.variant]
            philox = np.random.Philox(key=self.seed, counter=np.array(words, np.uint64))
            change = Distortion.draw(np.random.Generator(philox))
            key = f"{key}-{task.variant}"
        return Sample(key, lossless(self._pen.draw(glyph, change)), "png", task.label)

    def _held_out(self, group: _GlyphClass) -> list[str]:
        drawings = self._drawings
        trained = {drawings[c][f] for f, c in group.faces.items() if f not in TEST_FACES}
        held_out = [face for face in group.faces if face in TEST_FACES]
        new = [face for face in held_out if drawings[group.faces[face]][face] not in trained]
        return new or held_out[:1]

    @cached_property
    def _pen(self) -> Pen:
        return Pen(self.size)

    @cached_property
    def _drawings(self) -> Drawings:
        return _draw_characters(face_characters())

    @cached_property
    def _groups(self) -> list[_GlyphClass]:
        drawings, classes = self._drawings, []
        for codes in look_alikes(drawings):
            faces = sorted({face for code in codes for face in drawings[code]})
            chosen = {face: next(c for c in codes if face in drawings[c]) for face in faces}
            classes.append(_GlyphClass(tuple(codes), chosen))
        classes.sort(key=lambda group: (-len(group.faces), group.codes[0]))
        return classes[: self.classes_limit]


def _draw_characters(faces: dict[str, frozenset[int]]) -> Drawings:
    """Draw every character that at least `MIN_FACES` faces contain, where it is not blank.

    Spaces and control, format, private-use and unassigned code points are excluded.
    """
    count = Counter(code for codes in faces.values() for code in codes)
    wanted = [
        code
        for code in sorted(count)
        if count[code] >= MIN_FACES and unicodedata.category(chr(code))[0] not in "CZ"
    ]
    pen = Pen(_LOOK)
    drawings: Drawings = {}
    for code in wanted:
        drawn = {
            face: pen.draw(glyph).tobytes()
            for face, codes in faces.items()
            if code in codes and (glyph := pen.glyph(face, code)) is not None
        }
        if len(drawn) >= MIN_FACES:
            drawings[code] = drawn
    return drawings


def look_alikes(drawings: Drawings) -> list[list[int]]:
    """Group characters that look identical. Groups are sorted, and most have one member.

    Two characters are merged if their images are equal in more than half of the faces that contain
    both. Equality in all faces is not required, because a few faces draw the Cyrillic A slightly
    wider than the Latin A.
    """
    equal_faces: Counter[tuple[int, int]] = Counter()
    same: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    for code, drawn in sorted(drawings.items()):
        for face, drawing in drawn.items():
            same[face, drawing].append(code)
    for codes in same.values():
        equal_faces.update(combinations(codes, 2))
    codes = sorted(drawings)
    at = {code: i for i, code in enumerate(codes)}
    merged = [
        (at[a], at[b])
        for (a, b), equal in equal_faces.items()
        if 2 * equal > len(drawings[a].keys() & drawings[b].keys())
    ]
    rows, columns = np.array(merged, np.int64).reshape(-1, 2).T
    edges = coo_array((np.ones(len(rows)), (rows, columns)), (len(codes), len(codes)))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for code, number in zip(codes, connected_components(edges, False)[1], strict=True):
        groups[number].append(code)
    return list(groups.values())


def _path(character: str) -> str:
    """Return the block of a character and its kind within the block: `Cyrillic > Cyrillic, small
    letters`.
    """
    category = unicodedata.category(character)
    kind = _KINDS.get(category, _KINDS[category[0]])
    return join_path((block(character), f"{block(character)}, {kind}"))

"""A tiny WordNet `dict` folder.

The hypernyms are entity > animal > {carnivore > dog > poodle, pet > dog}; Rex is an instance of
dog, and crane has two senses.
"""

from pathlib import Path


def _synset(offset: int, words: list[str], *pointers: str) -> str:
    listed = " ".join(f"{word} 0" for word in words)
    above = "".join(f" {pointer}" for pointer in pointers)
    count = f"{len(words):02x} {listed} {len(pointers):03d}"
    return f"{offset:08d} 05 n {count}{above} | a gloss; @ 1"


def _above(*offsets: int) -> list[str]:
    return [f"@ {offset:08d} n 0000" for offset in offsets]


DATA = (
    "  1 This is a license @ 2",
    _synset(1, ["entity"], "~ 00000002 n 0000"),
    _synset(2, ["animal", "beast"], *_above(1), "! 00000001 a 0101"),
    _synset(3, ["carnivore"], *_above(2)),
    _synset(4, ["pet"], *_above(2)),
    _synset(5, ["dog", "domestic_dog"], "~ 00000006 n 0000", *_above(3, 4)),
    _synset(6, ["poodle", *"abcdefghij"], *_above(5)),
    _synset(7, ["Rex"], "@i 00000005 n 0000"),
    _synset(8, ["crane"], *_above(1)),
    _synset(9, ["crane"], *_above(2)),
)
INDEX = (
    "  1 This is a license",
    "dog n 1 2 @ ~ 1 1 00000005  ",
    "domestic_dog n 1 2 @ ~ 1 0 00000005  ",
    "poodle n 1 1 @ 1 1 00000006  ",
    "rex n 1 1 @i 1 0 00000007  ",
    "crane n 2 1 @ 2 1 00000009 00000008  ",
)


def write_wordnet(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in (("data.noun", DATA), ("index.noun", INDEX)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder

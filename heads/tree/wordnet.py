"""Reads the nouns of a WordNet `dict` folder (the format of wndb(5WN)) as a hierarchy.

Only `data.noun` and `index.noun` are needed, as every WordNet distribution has them. nltk's reader
wants more files and refuses folders that are not nltk's own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heads.tree.hierarchy import Hierarchy
from heads.tree.named_tree import NamedTree

_SYNSET_ID = re.compile(r"n\d{8}(?!\d)")
_SENSE = re.compile(r"(.+)\.n\.(\d+)")
_HYPERNYMS = ("@", "@i")


@dataclass(frozen=True)
class WordNet:
    """Noun synsets, named as ImageNet does (`n02084071`), under their hypernyms; and the senses of
    each lemma, the commonest first; `lemmas` of each synset, with commas between."""

    hierarchy: Hierarchy
    senses: dict[str, tuple[str, ...]]
    lemmas: dict[str, str]

    @property
    def origin(self) -> str:
        """What to call it in a message."""
        return self.hierarchy.origin

    def synset(self, name: str) -> str:
        """The synset of a class name: `n02084071` or what starts so (`n02084071_dog`), `dog.n.01`,
        or words, of which the first of a list `tench, Tinca tinca` that is known counts, in its
        commonest sense. ValueError for a name that is none of these."""
        if match := _SYNSET_ID.match(name):
            return match.group()
        if match := _SENSE.fullmatch(name):
            senses = self.senses.get(_lemma(match.group(1)), ())
            if 0 < int(match.group(2)) <= len(senses):
                return senses[int(match.group(2)) - 1]
        for words in name.split(","):
            if senses := self.senses.get(_lemma(words), ()):
                return senses[0]
        raise ValueError(
            f"class {name!r} is no noun in {self.origin}: "
            "give synsets such as n02084071 or dog.n.01"
        )

    def words(self, synset: str) -> str:
        """`dog, domestic dog, Canis familiaris`."""
        return self.lemmas[synset]

    def parents(self, synset: str) -> tuple[str, ...]:
        """Its hypernyms, in the order given; ValueError for a synset that is not there."""
        if synset not in self.hierarchy.parents:
            raise ValueError(f"class {synset!r} is not in {self.origin}: correct its name")
        return self.hierarchy.parents[synset]

    def tree(self, class_names: Sequence[str], *, collapse: bool = True) -> NamedTree:
        """The label tree of these classes; `synset` and `Hierarchy.tree` say how."""
        names = [self.synset(name) for name in class_names]
        return self.hierarchy.tree(class_names, names=names, collapse=collapse)


def read_wordnet(folder: str | Path) -> WordNet:
    """Read `data.noun` and `index.noun` of a folder.

    FileNotFoundError where one is missing, ValueError with the line of what is not their format.
    """
    folder = Path(folder)
    parents: dict[str, tuple[str, ...]] = {}
    lemmas: dict[str, str] = {}
    for line, text in _records(folder / "data.noun"):
        try:
            synset, words, above = _data_record(text)
        except (ValueError, IndexError):
            raise ValueError(f"{folder / 'data.noun'}, line {line} is no synset") from None
        parents[synset], lemmas[synset] = above, words
    lost = next((up for above in parents.values() for up in above if up not in parents), None)
    if lost is not None:
        raise ValueError(f"{folder / 'data.noun'} has no synset {lost}: the file is cut off")
    senses = {}
    for line, text in _records(folder / "index.noun"):
        fields = text.split()
        try:
            count = int(fields[2])
            senses[fields[0]] = tuple(f"n{int(offset):08d}" for offset in fields[-count:])
        except (ValueError, IndexError):
            raise ValueError(f"{folder / 'index.noun'}, line {line} is no lemma") from None
    titles = {synset: words.split(", ")[0] for synset, words in lemmas.items()}
    return WordNet(Hierarchy(f"WordNet {folder}", parents, titles), senses, lemmas)


def _records(path: Path) -> list[tuple[int, str]]:
    """Numbered lines, without the licence at the top, which is indented."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: give a WordNet dict folder, with data.noun and index.noun"
        )
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip() and line[0] != " "]


def _data_record(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Synset, its words, and its hypernyms in the order given."""
    fields = text.partition(" | ")[0].split()
    first_pointer = 5 + 2 * int(fields[3], 16)
    words = fields[4 : first_pointer - 1 : 2]
    num_pointers = int(fields[first_pointer - 1])
    pointers = [fields[first_pointer + 4 * i :][:3] for i in range(num_pointers)]
    above = tuple(
        f"n{int(offset):08d}"
        for symbol, offset, pos in pointers
        if symbol in _HYPERNYMS and pos == "n"
    )
    return f"n{int(fields[0]):08d}", ", ".join(words).replace("_", " "), above


def _lemma(words: str) -> str:
    return "_".join(words.replace("_", " ").split()).lower()

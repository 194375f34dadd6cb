"""Read the nouns of a WordNet `dict` folder (the format of wndb(5WN)) as a hierarchy.

Only `data.noun` and `index.noun` are needed; every WordNet distribution contains them. NLTK's
reader needs more files and accepts only NLTK's folder layout.
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
    """The noun synsets of WordNet, named as in ImageNet (`n02084071`), and their hypernyms.

    `senses` are the synsets of each lemma, most common first.
    """

    hierarchy: Hierarchy
    senses: dict[str, tuple[str, ...]]

    def synset(self, name: str) -> str:
        """Return the synset of a class name.

        The name is a synset ID, possibly with a suffix (`n02084071`, `n02084071_dog`), a sense
        (`dog.n.01`), or words. In a list of words (`tench, Tinca tinca`), the first known word is
        used in its most common sense. Raises ValueError for any other name.
        """
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
            f"class {name!r} is not a noun in {self.hierarchy.origin}: use a synset such as "
            "n02084071 or dog.n.01"
        )

    def tree(self, class_names: Sequence[str], *, collapse: bool = True) -> NamedTree:
        """Return the label tree of these classes; see `synset` and `Hierarchy.tree`."""
        names = [self.synset(name) for name in class_names]
        return self.hierarchy.tree(class_names, names=names, collapse=collapse)


def read_wordnet(folder: str | Path) -> WordNet:
    """Read `data.noun` and `index.noun` from a folder.

    Raises FileNotFoundError if either is missing, and ValueError with the line number if either is
    malformed.
    """
    folder = Path(folder)
    parents: dict[str, tuple[str, ...]] = {}
    titles: dict[str, str] = {}
    for line, text in _records(folder / "data.noun"):
        try:
            synset, title, above = _data_record(text)
        except (ValueError, IndexError):
            raise ValueError(
                f"{folder / 'data.noun'}, line {line} is not a synset: download the file again"
            ) from None
        parents[synset], titles[synset] = above, title
    missing = next((up for above in parents.values() for up in above if up not in parents), None)
    if missing is not None:
        raise ValueError(
            f"{folder / 'data.noun'} is truncated (no synset {missing}): download the file again"
        )
    senses = {}
    for line, text in _records(folder / "index.noun"):
        fields = text.split()
        try:
            count = int(fields[2])
            senses[fields[0]] = tuple(f"n{int(offset):08d}" for offset in fields[-count:])
        except (ValueError, IndexError):
            raise ValueError(
                f"{folder / 'index.noun'}, line {line} is not a lemma: download the file again"
            ) from None
    return WordNet(Hierarchy(f"WordNet {folder}", parents, titles), senses)


def _records(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of a file, without the indented license at the top."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: pass a WordNet dict folder with data.noun and index.noun"
        )
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip() and line[0] != " "]


def _data_record(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return a synset, its first word, and its hypernyms in file order."""
    fields = text.partition(" | ")[0].split()
    first_pointer = 5 + 2 * int(fields[3], 16)
    num_pointers = int(fields[first_pointer - 1])
    pointers = [fields[first_pointer + 4 * i :][:3] for i in range(num_pointers)]
    above = tuple(
        f"n{int(offset):08d}"
        for symbol, offset, pos in pointers
        if symbol in _HYPERNYMS and pos == "n"
    )
    return f"n{int(fields[0]):08d}", fields[4].replace("_", " "), above


def _lemma(words: str) -> str:
    return "_".join(words.replace("_", " ").split()).lower()

"""Class names as sources write them: without surrounding blanks, in Unicode NFC.

Two spellings that look the same would otherwise be two classes.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping

from data.messages import shown

_MAX_NOTES = 10


def class_name(text: str) -> str:
    """Return a class name in NFC, without a BOM and surrounding blanks. A line break inside it
    becomes a space.
    """
    lines = unicodedata.normalize("NFC", text.replace("\ufeff", "")).splitlines()
    return " ".join(line.strip() for line in lines if line.strip())


def joined_names(spellings: Iterable[str]) -> tuple[str, str]:
    """Return the class names of a set of labels, sorted and one per line, and the spelling of each.

    Spellings without a name are left out.
    """
    found: dict[str, str] = {}
    for spelling in spellings:
        if name := class_name(spelling):
            found.setdefault(name, " ".join(spelling.splitlines()))
    names = sorted(found)
    return "\n".join(names), "\n".join(found[name] for name in names)


def spelling_notes(spellings: Mapping[str, Iterable[str]], names: Iterable[str]) -> list[str]:
    """Return one line for each class that the source spells in several ways, and for each group of
    `names` that differ only by case.

    spellings: a map from a class to its spellings.
    """
    notes = []
    for name, found in sorted(spellings.items()):
        if len(several := sorted(set(found))) > 1:
            notes.append(f"{', '.join(map(ascii, several))} are the same class, {shown(name)}")
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.casefold()].append(name)
    for group in groups.values():
        if len(group) > 1:
            notes.append(f"classes {', '.join(map(shown, group))} differ only by case")
    more = len(notes) - _MAX_NOTES
    return notes[:_MAX_NOTES] + [f"{more:,} more notes about class names"] * (more > 0)

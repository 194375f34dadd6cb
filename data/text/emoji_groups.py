"""The groups and subgroups that Unicode sorts emoji into; the `emoji` library has none.

They stand in `emoji_groups.tsv` beside this, which `emoji_test.py` makes.
"""

from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("emoji_groups.tsv")
OTHER = ("Other", "other")


def emoji_group(one: str) -> tuple[str, str]:
    """Group and subgroup of a folded emoji: `Smileys & Emotion` and `heart` of ❤️.

    OTHER for an emoji that is newer than the table.
    """
    return _groups().get(one, OTHER)


@cache
def _groups() -> dict[str, tuple[str, str]]:
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {one: (row[0], row[1]) for row in rows if len(row) == 3 for one in row[2].split(" ")}

"""The table of Unicode's emoji groups is complete and generated from emoji-test.txt."""

import emoji
import pytest

from data.text.emoji_table import OTHER, emoji_group, find_emoji, fold, fully_qualified
from data.text.emoji_test import group_table

TEST_FILE = """\
# emoji-test.txt
# Version: 18.0

# group: Smileys & Emotion

# subgroup: heart
2764 FE0F                                              ; fully-qualified     # ❤️ E0.6 red heart
2764                                                   ; unqualified         # ❤ E0.6 red heart
# Smileys & Emotion subtotal:		2

# group: People & Body
# subgroup: hand-fingers-closed
1F44D                                                  ; fully-qualified     # 👍 E0.6 thumbs up
1F44D 1F3FD                                            ; fully-qualified     # 👍🏽 E1.0 thumbs up
# group: Component
# subgroup: skin-tone
1F3FD                                                  ; component           # 🏽 E1.0
"""


def test_every_emoji_of_the_library_has_a_group() -> None:
    without = [one for one in fully_qualified() if emoji_group(fold(one)) == OTHER]
    assert without == []
    named = {emoji_group(fold(one)) for one in fully_qualified()}
    assert len({group for group, _ in named}) == 9
    assert len({subgroup for _, subgroup in named}) == len(named)


@pytest.mark.parametrize(
    ("one", "group"),
    [
        ("❤", ("Smileys & Emotion", "heart")),
        ("👩🏽‍🚀", ("People & Body", "person-role")),
        ("🇫🇷", ("Flags", "country-flag")),
        ("#️⃣", ("Symbols", "keycap")),
    ],
)
def test_emoji_in_any_form_have_unicode_groups(one: str, group: tuple[str, str]) -> None:
    assert find_emoji(one) == [one]
    assert emoji_group(fold(one)) == group


def test_an_emoji_newer_than_the_table_is_in_group_other() -> None:
    assert emoji_group("\U0001fbff") == OTHER
    assert not emoji.is_emoji("\U0001fbff")


def test_the_table_is_generated_from_emoji_test() -> None:
    table = group_table(TEST_FILE)
    assert "version 18.0" in table
    assert [line for line in table.splitlines() if not line.startswith("#")] == [
        "Smileys & Emotion\theart\t❤️",
        "People & Body\thand-fingers-closed\t👍",
    ]
    with pytest.raises(ValueError, match=r"not Unicode's emoji-test\.txt"):
        group_table("hello\n")

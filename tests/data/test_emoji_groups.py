"""The table of Unicode's emoji groups is complete."""

import pytest

from data.text.emoji_table import OTHER, emoji_group, find_emoji, fold, fully_qualified


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

"""The table of Unicode's emoji groups is complete."""

from data.text.emoji_table import OTHER, emoji_group, fold, fully_qualified


def test_every_emoji_of_the_library_has_a_group() -> None:
    without = [one for one in fully_qualified() if emoji_group(fold(one)) == OTHER]
    assert without == []
    named = {emoji_group(fold(one)) for one in fully_qualified()}
    assert len({group for group, _ in named}) == 9
    assert len({subgroup for _, subgroup in named}) == len(named)

"""Emoji are found, folded and removed completely; no other character of any language changes."""

import unicodedata

import emoji
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sources.tweets import labels_by_policy
from data.text.cleaning import clean, is_retweet, remove_emoji
from data.text.emoji_table import PARTS, english_name, find_emoji, fold, fully_qualified

ZWJ = "\u200d"
# Combining marks, letter joiners, right-to-left scripts, text without spaces, decomposed forms.
LANGUAGES = (
    "Olódùmarè fúnmi láyọ̀ lọ́jọ́ òní. Ọlọ́run Ọba gbémi lékè",
    "cafe\u0301 naïve Ståle ĞİIı ß ŉ",
    "می\u200cخواهم ه\u200d و نستعلیق ۱۲۳",
    "क्\u200dष र्\u200dय क्षत्रिय १२३",
    "ക്\u200d ന്\u200d മലയാളം",
    "ශ්\u200dරී ලංකාව",
    "བོད་སྐད་ ខ្មែរ မြန်မာ ไทย ລາວ",
    "今日は、良い天気。（笑）ｶﾞ 〜 々",
    "한국어 조선말 ㅋㅋ",
    "Здравствуйте, ёж №5",
    "ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ⵜⴰⵎⴰⵣⵉⵖⵜ አማርኛ",
    "1+1=2 #1 *5* 50% a–b … “q” ‘s’ €5 §3",
    "private \ue001 \ue53e \uf8ff \U000fdfff \U000fef00",
    "line one\nline two\n\nline four\ttab",
)


@pytest.mark.parametrize("text", LANGUAGES)
def test_text_without_emoji_is_unchanged(text: str) -> None:
    assert remove_emoji(text) == text
    assert clean(text) == text
    assert find_emoji(text) == []
    assert not PARTS & set(text)
    assert remove_emoji(f"👩🏽{ZWJ}🚀 {text} ❤️🇫🇷") == text


def test_every_emoji_of_the_library_is_removed_completely() -> None:
    for one in emoji.EMOJI_DATA:
        assert remove_emoji(f"a {one} b{one}c") == "a b c", one
        assert remove_emoji(one) == ""


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("sun \ufe0f \ufe0f \ufe0f @ Venice", "sun @ Venice"),
        (f"yeah {ZWJ}\ufe0fthe guy", "yeah the guy"),
        (f"guy{ZWJ}♂️ hi", "guy hi"),
        (f"guy {ZWJ} hi", "guy  hi"),
        (f"क्{ZWJ}❤️ है", f"क्{ZWJ} है"),
        (f"😀{ZWJ}ه", "ه"),
        ("a 🏽 b \U0001f1eb c\u20e3 d\ufe0e", "a b c d"),
        ("flag \U0001f3f4\U000e0067\U000e0062", "flag"),
        ("12\u20e3 #️⃣ tag", "1 tag"),
        ("good😂\n\n🙏 night", "good\nnight"),
        ("a 😂😂😂😂 b 😂 c", "a b c"),
        ("© 2020 ™ x", "2020 x"),
        ("sun \U000fe000 \U000fe4e6\U000feeff rain", "sun rain"),
    ],
)
def test_parts_of_emoji_are_removed_too(text: str, left: str) -> None:
    assert remove_emoji(text) == left
    assert not PARTS & set(remove_emoji(text))


_PIECES = st.sampled_from([*"ab 1#\nهé❤👩🚀🏽\U0001f1eb\u20e3\ufe0f\ufe0e", "क्", ZWJ])


@settings(max_examples=500)
@given(st.lists(_PIECES, max_size=12).map("".join))
def test_cleaning_removes_all_emoji_parts_and_keeps_all_letters(text: str) -> None:
    cleaned = remove_emoji(text)
    assert not PARTS & set(cleaned)

    def letters(of: str) -> list[str]:
        return [char for char in of if unicodedata.category(char)[0] == "L"]

    assert letters(cleaned) == letters(text)
    assert remove_emoji(cleaned) == cleaned


def test_emoji_are_found_in_order_and_as_written() -> None:
    assert find_emoji(f"a👍🏽b🇫🇷 ❤ 1️⃣👩🏽{ZWJ}🚀") == ["👍🏽", "🇫🇷", "❤", "1️⃣", f"👩🏽{ZWJ}🚀"]
    assert find_emoji(f"क्{ZWJ}😀") == ["😀"]


@pytest.mark.parametrize(
    "text", ["plain 1 # *", "🏽", "❤\ufe0e", f"guy {ZWJ}♂️", "\U0001f1eb", "🦰"]
)
def test_an_incomplete_emoji_is_not_a_label(text: str) -> None:
    assert find_emoji(text) == []


@pytest.mark.parametrize(
    ("one", "folded"),
    [
        ("👍🏽", "👍"),
        ("❤", "❤️"),
        (f"👩🏽{ZWJ}🚀", f"👩{ZWJ}🚀"),
        (f"🤷🏿{ZWJ}♀️", f"🤷{ZWJ}♀️"),
        (f"🤷{ZWJ}♀", f"🤷{ZWJ}♀️"),
        (f"👨{ZWJ}🦰", f"👨{ZWJ}🦰"),
        (f"🫱🏻{ZWJ}🫲🏿", "🤝"),
        (f"🧑🏻{ZWJ}❤️{ZWJ}🧑🏿", "💑"),
        (f"👩🏻{ZWJ}🤝{ZWJ}👨🏿", "👫"),
        ("1⃣", "1️⃣"),
    ],
)
def test_folding_removes_tone_and_variation_and_keeps_gender_and_hair(
    one: str, folded: str
) -> None:
    assert fold(one) == folded


def test_folded_emoji_have_no_tones() -> None:
    folded = {fold(one) for one in fully_qualified()}
    assert folded == {fold(one) for one in folded}
    assert 1_800 < len(folded) < len(fully_qualified()) / 2
    assert not any("skin tone" in english_name(one) for one in folded)


def test_policies_select_the_labels_among_several_emoji() -> None:
    found = ["😂", "🙏", "🙏", "😂", "🔥"]
    assert labels_by_policy("first", found) == ["😂"]
    assert labels_by_policy("each", found) == ["😂", "🙏", "🔥"]
    assert labels_by_policy("most-frequent", found) == ["😂"]
    assert labels_by_policy("most-frequent", found[1:]) == ["🙏"]
    assert labels_by_policy("only-if-single", found) == []
    assert labels_by_policy("only-if-single", ["🔥", "🔥"]) == ["🔥"]
    assert labels_by_policy("first", []) == labels_by_policy("most-frequent", []) == []


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("@Ana_1 and @b: hi", "@user and @user: hi"),
        ("こんにちは@user1さん", "こんにちは@userさん"),
        ("write me@example.org", "write me@example.org"),
        ("see https://t.co/Ab1🔥 now", "see http now"),
        ("HTTP://X.com/a?b=c www.x.de end", "http http end"),
        ("読む https://t.co/Ab1です", "読む httpです"),
        ("@a @b https://t.co/x 😂", ""),
    ],
)
def test_user_names_and_urls_are_masked(text: str, replaced: str) -> None:
    assert clean(text) == replaced


@pytest.mark.parametrize("before", ["", '"', '""', "« ", "「"])
def test_a_retweet_begins_with_rt_and_a_name_or_with_a_quotation_mark(before: str) -> None:
    assert is_retweet(f"{before}RT @ana: so true")
    assert is_retweet(f"RT {before}@ana: so true")
    assert not is_retweet(f"{before}@ana: so true")
    assert not is_retweet(f"{before}RT this")
    assert not is_retweet(f"{before}ART @ana")
    assert not is_retweet(f"so true {before}RT @ana")

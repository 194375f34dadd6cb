"""Names of emoji in many languages. Some languages are only in the test split."""

import emoji
import numpy as np
import pytest

from data.sources import EmojiNames
from data.text.emoji_table import OTHER, emoji_group, fold, fully_qualified


@pytest.fixture(scope="module")
def names() -> EmojiNames:
    return EmojiNames()


def test_the_source_has_thousands_of_classes_in_every_language(names: EmojiNames) -> None:
    infos = names.classes()
    assert 1_800 < len(infos) < 2_200
    splits = names.splits()
    assert {task.language for task in splits["test"]} == {"it", "fa"}
    assert {t.language for t in splits["train"]} == set(emoji.LANGUAGES) - {"it", "fa"}
    assert {task.label for task in splits["train"]} == set(range(len(infos)))
    assert len(splits["train"]) > 20 * len(infos)


def test_each_text_is_a_name_labeled_with_its_emoji_without_skin_tone(names: EmojiNames) -> None:
    infos = names.classes()
    toned = [task for task in names.splits()["train"] if task.emoji == "👍🏽"]
    assert len(toned) == 12
    for task in toned:
        assert infos[task.label].attributes["emoji"] == "👍"
        sample = names.render(task)
        name = emoji.EMOJI_DATA["👍🏽"][task.language].strip(":").replace("_", " ")
        assert sample.data.decode() == name
        assert (sample.key, sample.extension) == (f"{task.language}/1f44d-1f3fd", "txt")


def test_every_emoji_of_the_library_has_a_group() -> None:
    groups = [emoji_group(fold(one)) for one in fully_qualified()]
    assert OTHER not in groups
    assert len({group for group, _ in groups}) == 9


@pytest.mark.parametrize(
    ("one", "name", "path", "base"),
    [
        ("❤️", "red heart", "Smileys & Emotion > heart", None),
        ("👩\u200d🚀", "woman astronaut", "People & Body > person-role", "👩"),
        ("🇫🇷", "France", "Flags > country-flag", "flag"),
        ("1️⃣", "keycap 1", "Symbols > keycap", "keycap"),
    ],
)
def test_classes_have_names_and_attributes(
    names: EmojiNames, one: str, name: str, path: str, base: str | None
) -> None:
    (info,) = (info for info in names.classes() if info.attributes["emoji"] == one)
    assert info.name == name
    about = {name: info.attributes.get(name) for name in ("path", "base")}
    assert about == {"path": path, "base": base}


def test_emoji_with_similar_names_have_similar_vectors(names: EmojiNames) -> None:
    vectors = names.label_vectors()
    at = {info.attributes["emoji"]: i for i, info in enumerate(names.classes())}
    assert vectors.shape == (len(at), 64)
    assert np.isfinite(vectors).all()

    def similarity(a: str, b: str) -> float:
        return float(vectors[at[a]] @ vectors[at[b]])

    for one, near, far in (
        ("💙", "💜", "🚗"),
        ("🇫🇷", "🇩🇪", "🍕"),
        ("👩\u200d🚀", "👨\u200d🚀", "🐟"),
    ):
        assert similarity(one, near) > similarity(one, far) + 0.2


def test_classes_and_languages_can_be_selected() -> None:
    source = EmojiNames(20, languages=("en", "fr", "de"), test_languages=("de",))
    splits = source.splits()
    languages = {split: {task.language for task in tasks} for split, tasks in splits.items()}
    assert languages == {"train": {"en", "fr"}, "test": {"de"}}
    assert source.label_vectors().shape[0] == len(source.classes()) == 20
    (keycap,) = (task for task in splits["test"] if task.emoji == "#️⃣")
    assert source.render(keycap).data.decode() == "taste #"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"languages": ("en", "xx")}, "language 'xx' is not supported by the emoji library"),
        ({"languages": ("en", "fr")}, "pass some, but not all, of --languages"),
        ({"languages": ("it",), "test_languages": ("it",)}, "pass some, but not all"),
    ],
)
def test_invalid_parameters_raise(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmojiNames(**wrong)

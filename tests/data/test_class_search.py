"""Exact lookup, substring search and nearest names among any number of class names."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from data.classes import search
from data.classes.class_list import ClassInfo
from data.classes.search import SearchableClassList

ODD = ["Straße", "STRASSE 2", "猫", "a\nline", "#999", "ǅungla", "İstanbul", "a" * 300, "e\u0301"]


@pytest.fixture
def written(tmp_path: Path) -> Callable[[list[str]], SearchableClassList]:
    """Return a function that writes a class list and opens it."""

    def write(names: list[str]) -> SearchableClassList:
        SearchableClassList.of(map(entry_of, names)).write(tmp_path / "classes")
        return SearchableClassList.open(tmp_path / "classes", len(names))

    return write


def entry_of(name: str) -> ClassInfo:
    return ClassInfo(name=name, attributes={"length": str(len(name))} if len(name) % 2 else {})


def random_names(num: int) -> list[str]:
    draw = random.Random(0)
    drawn = {"".join(draw.choices("abcAB é猫", k=draw.randint(1, 9))) for _ in range(num)}
    return [*sorted(drawn - {*ODD}), *ODD]


def plain_search(names: list[str], text: str) -> list[int]:
    folded = text.casefold()
    found = [index for index, name in enumerate(names) if folded in name.casefold()]
    return sorted(found, key=lambda index: not names[index].casefold().startswith(folded))


@pytest.mark.parametrize(
    "text", ["a", "AB", "aa", "é", "猫", "strasse", "\n", "b a", "zzz", "i̇", "", "\udcff"]
)
def test_search_finds_the_same_names_as_a_scan_of_all_names(
    written, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(search, "_CHUNK", 64)  # bytes of names, which then span many blocks
    listed = random_names(500)
    expected = plain_search(listed, text)
    names = written(listed)
    assert names.search(text, limit=10_000) == (expected, len(expected))
    assert names.search(text, limit=3, offset=2) == (expected[2:5], len(expected))


def test_every_class_is_found_by_its_name_and_no_other_text_is(written) -> None:
    listed = random_names(500)
    names = written(listed)
    assert list(names) == [entry_of(name) for name in listed]
    assert [names.id_of(name) for name in listed] == list(range(len(listed)))
    assert [names.find(name) for name in listed] == list(range(len(listed)))
    assert names.find("#3") is None
    for unknown in ("", "aa\x00", "STRAẞE", "\udcff"):
        with pytest.raises(ValueError, match="no class"):
            names.id_of(unknown)


@pytest.mark.parametrize(
    "name", ["species 431947", "Siberian husky", "LATIN CAPITAL LETTER E", "猫と犬"]
)
def test_the_nearest_of_many_names_is_the_misspelled_one(written, name: str) -> None:
    listed = [f"species {index * 7919 % 1_000_003}" for index in range(10_000)]
    names = written([*dict.fromkeys([*listed, name])])
    middle = len(name) // 2
    misspelled = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    assert misspelled != name
    assert names.nearest(misspelled)[0] == name
    assert names.nearest(misspelled.upper())[0] == name

"""Exact lookup, substring search and nearest names among any number of class names."""

import random
from pathlib import Path

import pytest

from trainer.bundle import class_names
from trainer.bundle.class_list import ClassList, write_classes
from trainer.bundle.class_names import ClassNames, index_names
from trainer.bundle.spec import ClassEntry

ODD = ["Straße", "STRASSE 2", "猫", "a\nline", "#999", "ǅungla", "İstanbul", "a" * 300, "e\u0301"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search 64 bytes of names at a time, so that even a few names span many blocks."""
    monkeypatch.setattr(class_names, "_CHUNK", 64)


def random_names(num: int) -> list[str]:
    draw = random.Random(0)
    drawn = {"".join(draw.choices("abcAB é猫", k=draw.randint(1, 9))) for _ in range(num)}
    return [*sorted(drawn - {*ODD}), *ODD]


def plain_search(names: list[str], text: str) -> list[int]:
    folded = text.casefold()
    found = [index for index, name in enumerate(names) if folded in name.casefold()]
    return sorted(found, key=lambda index: not names[index].casefold().startswith(folded))


@pytest.mark.parametrize("text", ["a", "AB", "aa", "é", "猫", "strasse", "\n", "b a", "zzz", "i̇"])
def test_search_finds_the_same_names_as_a_scan_of_all_names(small_blocks, text: str) -> None:
    listed = random_names(500)
    expected = plain_search(listed, text)
    names = ClassNames(listed)
    assert names.search(text, limit=10_000) == (expected, len(expected))
    assert names.search(text, limit=3, offset=2) == (expected[2:5], len(expected))


def test_search_returns_prefix_matches_first_and_the_total() -> None:
    names = ClassNames(["a cat", "Cat", "dog", "catfish", "bobcat"])
    assert names.search("CAT", limit=10) == ([1, 3, 0, 4], 4)
    assert names.search("cat", limit=2, offset=1) == ([3, 0], 4)
    assert names.search("", limit=2, offset=3) == ([3, 4], 5)
    assert names.search("\udcff", limit=2) == ([], 0)


def test_every_name_is_found_and_no_other_text() -> None:
    listed = random_names(500)
    names = ClassNames(listed)
    assert [names.id_of(name) for name in listed] == list(range(len(listed)))
    assert [names.find(name) for name in listed] == list(range(len(listed)))
    assert ClassNames(["a", "b", "#1", "#0"]).find("#0") == 3
    assert names.find("#3") is None
    for unknown in ("", "aa\x00", "STRAẞE", "\udcff"):
        with pytest.raises(ValueError, match="no class"):
            names.id_of(unknown)


def test_names_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_names, "_hash", lambda name: len(name) % 2)
    names = ClassNames(["a", "b", "cc", "dd", "e"])
    assert [names.id_of(name) for name in "ab"] == [0, 1]
    assert names.id_of("dd") == 3
    with pytest.raises(ValueError, match="no class 'x'"):
        names.id_of("x")
    with pytest.raises(ValueError, match="duplicate class name 'dd'"):
        index_names(["cc", "dd", "ee", "dd"])


@pytest.mark.parametrize(
    "name", ["species 431947", "Siberian husky", "LATIN CAPITAL LETTER E", "猫と犬"]
)
def test_the_nearest_of_many_names_is_the_misspelled_one(name: str) -> None:
    listed = [f"species {index * 7919 % 1_000_003}" for index in range(100_000)]
    names = ClassNames([*{*listed, name}])
    middle = len(name) // 2
    misspelled = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    assert misspelled != name
    assert names.nearest(misspelled)[0] == name
    assert names.nearest(misspelled.upper())[0] == name


def test_a_class_list_on_disk_returns_what_was_written(tmp_path: Path) -> None:
    entries = [
        ClassEntry(name=name, attributes={"at": str(index)} if index % 2 else {})
        for index, name in enumerate(random_names(50))
    ]
    assert write_classes(tmp_path, entries) == len(entries)
    opened = ClassList(tmp_path, len(entries))
    assert [opened[index] for index in range(len(opened))] == entries
    listed = [entry.name for entry in entries]
    assert opened.names.names[3:9:2] == listed[3:9:2]
    assert [opened.names.id_of(name) for name in listed] == list(range(len(listed)))
    assert opened.names.search("a", limit=99) == ClassNames(listed).search("a", limit=99)
    assert opened.names.nearest("strase") == ClassNames(listed).nearest("strase")
    opened.close()
    with pytest.raises(AssertionError, match="is closed"):
        opened[0]

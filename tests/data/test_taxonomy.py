"""From synsets of several words and parents to the attributes of classes."""

from dataclasses import dataclass

import pytest

from data.sources.layouts.taxonomy import ClassTaxonomy


@dataclass
class Synsets:
    """id -> (words, parents); a class name is its id."""

    known: dict[str, tuple[str, tuple[str, ...]]]
    origin: str = "Synsets"

    def synset(self, class_name: str) -> str:
        return class_name

    def words(self, synset: str) -> str:
        return self.known[synset][0]

    def parents(self, synset: str) -> tuple[str, ...]:
        return self.known[synset][1]


SYNSETS = Synsets(
    {
        "n1": ("entity", ()),
        "n2": ("animal, beast", ("n1",)),
        "n3": ("carnivore", ("n2",)),
        "n4": ("pet", ("n2",)),
        "n5": ("dog, domestic dog", ("n3", "n4")),
        "n6": ("poodle", ("n5",)),
        "n7": ("crane", ("n1",)),
        "n8": ("crane", ("n1",)),
        "n9": ("tower crane", ("n7",)),
        "n10": ("sarus crane", ("n8",)),
        "n11": ("entity", ("n2",)),
        "n12": ("soul", ("n11",)),
    }
)


def paths(*names: str) -> list[str | None]:
    return [about.get("path") for about in ClassTaxonomy(SYNSETS, names).attributes()]


def test_a_class_carries_its_words_its_parents_and_the_path_through_the_first_of_them() -> None:
    assert ClassTaxonomy(SYNSETS, ["n5"]).attributes() == [
        {
            "words": "dog, domestic dog",
            "parents": "n3 n4",
            "path": "entity > animal > carnivore",
        }
    ]
    assert ClassTaxonomy(SYNSETS, ["n1"]).attributes() == [{"words": "entity"}]


def test_a_class_above_or_beside_another_stands_under_its_own_name() -> None:
    assert paths("n5", "n6") == ["entity > animal > carnivore > dog"] * 2
    assert paths("n6") == ["entity > animal > carnivore > dog"]
    assert paths("n6", "n6") == ["entity > animal > carnivore > dog > poodle"] * 2


def test_nodes_of_one_name_are_told_apart_where_they_would_be_taken_for_one() -> None:
    assert paths("n9", "n10") == ["entity > crane (n7)", "entity > crane (n8)"]
    assert paths("n9") == ["entity > crane"]
    assert paths("n12") == ["entity > animal > entity (n11)"]


def test_a_choice_among_parents_is_said() -> None:
    (note,) = ClassTaxonomy(SYNSETS, ["n6", "n9"]).notes()
    assert note.startswith("1 synsets at and above the classes have several parents")
    assert "the first that Synsets lists counts" in note
    assert ClassTaxonomy(SYNSETS, ["n9"]).notes() == []


def test_the_ways_up_are_walked_once_for_attributes_and_notes() -> None:
    asked: list[str] = []

    class Counting(Synsets):
        def synset(self, class_name: str) -> str:
            asked.append(class_name)
            return class_name

    placed = ClassTaxonomy(Counting(SYNSETS.known), ["n5", "n9"])
    assert placed.attributes() == placed.attributes()
    assert len(placed.notes()) == 1
    assert asked == ["n5", "n9"]


def test_a_cycle_is_refused_with_the_synset() -> None:
    circle = Synsets({"a": ("a", ("b",)), "b": ("b", ("c",)), "c": ("c", ("b",))})
    with pytest.raises(ValueError, match="Synsets has b above itself, over class a"):
        ClassTaxonomy(circle, ["a"]).attributes()

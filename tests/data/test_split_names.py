"""All sources name their splits by the same rule: a single held-out split is `test`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.shards.split_names import shard_splits, split_name
from data.sources import ImageFolder, Source, Table
from tests.data.conftest import write_image


@pytest.mark.parametrize(
    ("words", "in_shards"),
    [
        (("train", "test"), ["train", "test"]),
        (("Training", "val"), ["train", "test"]),
        (("train", "holdout"), ["train", "test"]),
        (("train", "dev", "test"), ["train", "validation", "test"]),
        (("train", "valid", "extra"), ["train", "validation", "extra"]),
        (("train",), ["train"]),
    ],
)
def test_a_single_held_out_split_is_called_test_and_several_keep_their_names(
    words: tuple[str, ...], in_shards: list[str]
) -> None:
    names = [split_name(word) for word in words]
    assert [shard_splits(names)[name] for name in names] == in_shards


def imagefolder(folder: Path, held_out: tuple[str, ...]) -> Source:
    for split in ("train", *held_out):
        for number, name in enumerate("ab"):
            write_image(folder / split / name / f"{split}.png", number)
    return ImageFolder(folder)


def table(folder: Path, held_out: tuple[str, ...]) -> Source:
    rows = [f"{split} {name},{name},{split}" for split in ("train", *held_out) for name in "ab"]
    (folder / "a.csv").write_text("\n".join(["text,label,split", *rows, ""]))
    return Table((folder / "a.csv",), folder / "work", "label", text="text", split="split")


@pytest.mark.parametrize("source", [imagefolder, table])
def test_sources_with_split_folders_or_columns_follow_the_rule(
    tmp_path: Path, source: Callable[[Path, tuple[str, ...]], Source]
) -> None:
    for held_out, splits in (
        (("val",), ["test", "train"]),
        (("val", "test"), ["test", "train", "validation"]),
    ):
        (folder := tmp_path / "-".join(held_out)).mkdir()
        assert sorted(source(folder, held_out).splits()) == splits


def test_a_table_notes_a_renamed_split(tmp_path: Path) -> None:
    source = table(tmp_path, ("holdout",))
    assert source.splits().keys() == {"train", "test"}
    assert any("split 'holdout' is called 'test'" in note for note in source.notes())

"""All sources name their splits by the same rule: a single held-out split is `test`."""

import pytest

from data.shards.split_names import shard_splits, split_name


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

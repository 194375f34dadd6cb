"""How shards call the splits of a source. All sources follow this one rule.

`train` is what training reads, and every other split is held out. A single held-out split is called
`test`, whatever the source calls it: that is the default of `data.eval_split`. If there are
several, each keeps its name, with `val`, `valid`, `dev` and `eval` written as `validation`.
"""

from collections.abc import Iterable

TRAIN, TEST, VALIDATION = "train", "test", "validation"

# The words that sources use, in lower case.
SPLIT_OF_WORD = {
    **dict.fromkeys((TRAIN, "training"), TRAIN),
    **dict.fromkeys((TEST, "testing"), TEST),
    **dict.fromkeys((VALIDATION, "val", "valid", "dev", "eval"), VALIDATION),
}


def split_name(word: str) -> str:
    """`train`, `test` or `validation` for the usual words, in any case; others as they are."""
    return SPLIT_OF_WORD.get(word.lower(), word)


def shard_splits(names: Iterable[str]) -> dict[str, str]:
    """The name in the shards of each split of a source, which are named by `split_name`."""
    found = dict.fromkeys(names)
    held_out = [name for name in found if name != TRAIN]
    return {name: TEST if held_out == [name] else name for name in found}


def renamed_splits(names: Iterable[str]) -> list[str]:
    """One line for each split that the shards call by another name."""
    return [
        f"split {name!r} is called {in_shards!r} in the shards, because it is the only one held out"
        for name, in_shards in shard_splits(names).items()
        if name != in_shards
    ]

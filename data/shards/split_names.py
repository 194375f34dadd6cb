"""Rules for naming the splits in the shards, which are the same for all sources.

`train` is used for training, and every other split is held out. A single held-out split is called
`test`, regardless of its name in the source, because that is the default of `data.eval_split`. If
there are several held-out splits, each keeps its name, except that `val`, `valid`, `dev` and `eval`
become `validation`.
"""

import re
from collections.abc import Iterable

from data.messages import shown

TRAIN, TEST, VALIDATION = "train", "test", "validation"

# The words that sources use for splits, in lower case.
SPLIT_OF_WORD = {
    **dict.fromkeys((TRAIN, "training"), TRAIN),
    **dict.fromkeys((TEST, "testing"), TEST),
    **dict.fromkeys((VALIDATION, "val", "valid", "dev", "eval"), VALIDATION),
}


def split_name(word: str) -> str:
    """Map common names of splits, in upper or lower case, to `train`, `test` or `validation`. Other
    names are kept.
    """
    return SPLIT_OF_WORD.get(word.lower(), word)


def checked_split(word: str) -> str:
    """Return `split_name(word)`. Raises ValueError for a name that cannot begin a file name."""
    check_split(word)
    return split_name(word)


def check_split(word: str) -> None:
    """Raise ValueError for a name that cannot begin a file name."""
    if not re.fullmatch(r"\w[\w.-]*", word):
        raise ValueError(
            f"{shown(word)} cannot be the name of a split: use letters, digits, underscores, "
            "dots and hyphens"
        )


def split_in_name(name: str) -> str | None:
    """Return the split of the first word in a file name or path that names one, such as `dev`;
    otherwise, of the first part of a word, such as `TrainImages`.
    """
    parts = [part.lower() for part in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)]
    words = re.findall("[a-z]+", name.lower()) + parts
    return next((SPLIT_OF_WORD[word] for word in words if word in SPLIT_OF_WORD), None)


def shard_splits(names: Iterable[str]) -> dict[str, str]:
    """Map each split of a source (as `split_name` returns it) to its name in the shards."""
    found = dict.fromkeys(names)
    held_out = [name for name in found if name != TRAIN]
    return {name: TEST if held_out == [name] else name for name in found}


def renamed_splits(names: Iterable[str]) -> list[str]:
    """Return one line for each split that has a different name in the shards."""
    return [
        f"split {name!r} is called {in_shards!r} in the shards: it is the only held-out split"
        for name, in_shards in shard_splits(names).items()
        if name != in_shards
    ]

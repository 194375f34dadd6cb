"""Examples from a folder of shards. The command `kway shard show` formats them.

Examples are deterministic: the first samples of classes that are evenly spaced in the class list.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.shards.manifest import Manifest
from data.shards.split import Split, open_split


def open_all(folder: Path | str, manifest: Manifest, name: str) -> Split:
    """Open a split to display it, without a limit on bad labels."""
    return open_split(folder, name, max_bad_labels=2**63, manifest=manifest)


def examples(split: Split, number: int) -> list[int]:
    """Return up to `number` samples of a split, in class-list order.

    If there are more than `number` classes, the result contains one sample of each of `number`
    classes. Otherwise, it contains the same number of samples of each class.
    """
    present = np.flatnonzero(split.class_counts())
    chosen = present[
        np.linspace(0, len(present) - 1, min(number, len(present))).round().astype(int)
    ]
    each = max(1, number // max(1, len(chosen)))
    labels = split.labels
    return [i for label in chosen for i in np.flatnonzero(labels == label)[:each].tolist()]


def texts(split: Split, number: int) -> Iterator[tuple[str, str]]:
    """Yield (class name, text) for each example. Invalid UTF-8 is shown as U+FFFD."""
    for index in examples(split, number):
        try:
            data, _, label = split.read(index)
        except ValueError as error:
            yield "damaged", str(error)
            continue
        yield split.classes[label].name, data.decode("utf-8", "replace")

"""The rows that the scripts in this folder write: a text, its labels, its split and its group."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A text with its labels. Rows of the same group are in the same split."""

    text: str
    labels: set[str]
    group: str
    split: str


def split_of(group: str, test_fraction: float) -> str:
    """Return the split of a group: the one that `kway shard table --group group` chooses."""
    high = hashlib.blake2b(group.encode(), digest_size=16).digest()[:8]
    return "test" if float(int.from_bytes(high)) < test_fraction * 2.0**64 else "train"


def write(rows: Iterable[Row], out: Path, *, min_count: int) -> None:
    """Write JSON lines with the columns text, labels, split and group, and print their numbers.

    Labels with fewer than `min_count` training rows are dropped, and then rows without labels.
    Exits with an error if no training rows are left.
    """
    rows = list(rows)
    count = Counter(label for row in rows if row.split == "train" for label in row.labels)
    kept: dict[str, list[int]] = {"train": [], "test": []}  # numbers of labels of each row
    with out.open("w", encoding="utf-8") as file:
        for row in rows:
            labels = sorted(label for label in row.labels if count[label] >= min_count)
            if labels:
                kept[row.split].append(len(labels))
                fields = {
                    "text": row.text,
                    "labels": labels,
                    "split": row.split,
                    "group": row.group,
                }
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    if not kept["train"]:
        sys.exit(f"error: {out}: no label has {min_count} training rows: lower --min-count")
    num_labels = sum(number >= min_count for number in count.values())
    per_row = sum(kept["train"]) / len(kept["train"])
    print(
        f"{out}: {len(kept['train']):,} training and {len(kept['test']):,} test rows, "
        f"{num_labels:,} labels, {per_row:.2f} per training row"
    )

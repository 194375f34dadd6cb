"""The tables that `kway shard show` and `check` print: splits, classes, texts and leaks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from data.inspection.contents import SplitContents, histogram, texts
from data.messages import printable
from data.shards.manifest import Manifest
from data.shards.split import Split
from launch.terminal import table_cell

if TYPE_CHECKING:
    from data.inspection.leaks import LeakReport

_ALL_CLASSES = 30  # up to this many classes, list every class
_ENDS = 5  # with more classes, list this many of the largest and the smallest
_BAR = 28
_TEXT = 200


def split_table(folder: Path | str, manifest: Manifest, splits: Sequence[SplitContents]) -> Table:
    """Return a table with one row per split.

    The title contains the modality, the number of classes and the source.
    """
    kind = "texts" if manifest.modality == "text" else "images"
    sources = dict.fromkeys(source.kind for source in manifest.sources)
    title = f"{folder}: {kind} of {len(manifest.classes):,} classes, from {', '.join(sources)}"
    table = plain_table(title)
    for name in ("split", "samples", "classes", "shards", "MB", "bytes/sample"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split in splits:
        no_class = f" ({split.no_class:,} without a class)" if split.no_class else ""
        table.add_row(
            table_cell(split.name),
            f"{split.samples:,}{no_class}",
            f"{np.count_nonzero(split.counts):,}",
            f"{split.shards:,}",
            f"{split.bytes / 1e6:,.1f}",
            f"{split.bytes / split.samples:,.0f}",
        )
    return table


def class_table(manifest: Manifest, splits: Sequence[SplitContents]) -> Table:
    """Return a table of the samples per class over all splits.

    With many classes, it shows a histogram and only the largest and smallest classes.
    """
    counts = np.sum([split.counts for split in splits], axis=0)
    order = np.argsort(-counts, kind="stable")
    if len(counts) <= _ALL_CLASSES:
        table = plain_table("samples per class", show_header=False)
        _add_classes(table, manifest, counts, np.arange(len(counts)))
        return table
    table = plain_table("samples per class", show_header=False)
    bins = histogram(counts)
    longest = max(part.classes for part in bins)
    for part in bins:
        span = f"{part.low:,}" if part.low == part.high else f"{part.low:,} to {part.high:,}"
        samples = f"{span} sample{'s' if part.high != 1 else ''}"
        classes = f"{part.classes:,} class{'es' if part.classes != 1 else ''}"
        table.add_row(samples, classes, _bar(part.classes, longest))
    table.add_section()
    _add_classes(table, manifest, counts, order[:_ENDS])
    table.add_row("…", "", "")
    _add_classes(table, manifest, counts, order[-_ENDS:])
    return table


def _add_classes(table: Table, manifest: Manifest, counts: np.ndarray, labels: np.ndarray) -> None:
    most = int(counts.max())
    for label in labels.tolist():
        name = table_cell(manifest.classes[label].name)
        table.add_row(name, f"{counts[label]:,}", _bar(int(counts[label]), most))


def leak_table(report: "LeakReport", rows: int) -> Table:
    """Return a table with one row per suspect, followed by `rows` other characters."""
    table = Table("character", "texts", "class", "precision", "lift", "gain", "suspect")
    for leak in report.leaks[: len(report.suspects) + rows]:
        table.add_row(
            leak.name,
            f"{leak.texts:,}",
            table_cell(leak.class_name),
            f"{leak.precision:.2f}",
            f"{leak.lift:.1f}",
            f"{leak.gain:+.3f}",
            leak.suspect or "",
        )
    return table


def text_table(split: Split, number: int) -> Table:
    """Return a table of example texts and their classes."""
    table = plain_table(f"texts of {split.name}", show_header=False)
    for name, text in texts(split, number):
        table.add_row(table_cell(name), table_cell(text, _TEXT))
    return table


def _bar(value: int, longest: int) -> str:
    eighths = -(-value * _BAR * 8 // max(longest, 1))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def plain_table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=Text(printable(title)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        show_header=show_header,
    )

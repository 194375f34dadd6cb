"""`kway shard NAME --preview`: prints what a command would write, without writing anything."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from data.messages import printable
from data.skipped import Skipped, by_reason
from data.sources import CommandSource
from data.sources.label_vectors import WithLabelVectors
from launch.commands.shard_tables import plain_table
from launch.terminal import table_cell, wide_console

_CLASSES = 10
_EXAMPLES = 2
_TEXT = 60


def print_preview(source: CommandSource, *, vectors: WithLabelVectors | None = None) -> None:
    """Print the splits, the first classes with examples, and the ignored files by reason.

    Images are not decoded, so bad images are not detected. vectors: `source` with
    label vectors from a file, which are read and checked.
    """
    splits = source.splits()
    names = [info.name for info in source.classes()]
    counts = {split: Counter(task.label for task in tasks) for split, tasks in splits.items()}
    console = wide_console(160)
    print(f"{len(names):,} classes of {source.modality}s, from {source.kind}")
    console.print(_split_table(counts))
    console.print(_class_table(source, splits, counts, names[:_CLASSES], len(names)))
    if ignored := source.skipped():
        console.print(_ignored_table(ignored))
    notes = [note for note in source.notes() if note not in by_reason(ignored)]
    if vectors is not None:
        found = vectors.label_vectors()
        print(printable(f"label vectors from {vectors.file}: {len(found):,} x {found.shape[1]:,}"))
        notes += vectors.notes()
    for note in notes:
        print(printable(f"note: {note}"))
    print("nothing was written: omit --preview to write the shards")


def _split_table(counts: dict[str, Counter[int]]) -> Table:
    table = plain_table("splits")
    for name in ("split", "samples", "classes"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, of_class in counts.items():
        table.add_row(table_cell(split), f"{of_class.total():,}", f"{len(of_class):,}")
    return table


def _class_table(
    source: CommandSource,
    splits: dict[str, Sequence[Any]],
    counts: dict[str, Counter[int]],
    names: Sequence[str],
    num_classes: int,
) -> Table:
    table = plain_table(f"first {len(names)} of {num_classes:,} classes")
    table.add_column("class")
    for split in splits:
        table.add_column(table_cell(split), justify="right")
    table.add_column("examples")
    examples = _examples(splits, len(names))
    for label, name in enumerate(names):
        shown = "  ".join(source.example(task)[:_TEXT] for task in examples[label])
        numbers = [f"{of_class[label]:,}" for of_class in counts.values()]
        table.add_row(table_cell(name), *numbers, table_cell(shown, 2 * _TEXT + 2))
    return table


def _examples(splits: dict[str, Sequence[Any]], num_classes: int) -> dict[int, list[Any]]:
    """Return the first tasks of each of the first classes, from the first splits."""
    found: dict[int, list[Any]] = defaultdict(list)
    for tasks in splits.values():
        for task in tasks:
            if task.label < num_classes and len(found[task.label]) < _EXAMPLES:
                found[task.label].append(task)
    return found


def _ignored_table(ignored: Sequence[Skipped]) -> Table:
    names: dict[str, list[str]] = defaultdict(list)
    for one in ignored:
        names[one.reason].append(one.name)
    table = plain_table(f"{len(ignored):,} files and folders are not read")
    for name in ("number", "reason", "first"):
        table.add_column(name, justify="right" if name == "number" else "left")
    for reason, found in sorted(names.items(), key=lambda item: -len(item[1])):
        table.add_row(f"{len(found):,}", table_cell(reason, 100), table_cell(found[0], _TEXT))
    return table

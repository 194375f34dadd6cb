"""`kway shard`: writes webdataset shards from sources, and inspects or indexes existing shards.

`shard_source.py` derives one command from each source in `data.sources.SOURCES`.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from data.messages import pluralize, printable
from launch.options import RayAddress
from launch.output_path import explain_write_errors
from launch.shard_runs import Workers, connected, print_skipped, summary
from launch.terminal import progress, seconds_since, table_cell

if TYPE_CHECKING:
    import numpy as np

Shards = Annotated[
    str, typer.Argument(metavar="SHARDS", help="folder or URL of shards with manifest.json")
]


_ALL_CLASSES = 30  # up to this many classes, list every class
_ENDS = 5  # with more classes, list this many of the largest and the smallest
_BAR = 28
_NUM_TEXTS, _NUM_IMAGES = 12, 48
_OTHER_CHARACTERS = 10  # listed by `check` in addition to suspect ones


class _Sources(TyperGroup):
    """Adds the source commands on demand, so that `kway --help` does not import any source."""

    def list_commands(self, context: Any) -> list[str]:
        self._add_sources()
        return super().list_commands(context)

    def get_command(self, context: Any, name: str) -> Any:
        if name not in self.commands:
            self._add_sources()
        return super().get_command(context, name)

    def _add_sources(self) -> None:
        from launch.commands.shard_source import source_commands

        self.commands = {**source_commands(), **self.commands}


app = typer.Typer(
    cls=_Sources, help="Write shards from a source, or inspect shards.", no_args_is_help=True
)


@app.command()
def check(
    shards: Shards,
    split: Annotated[str, typer.Option(help="split of texts to check for leaks")] = "train",
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with code 2 if a character is suspect")
    ] = False,
) -> None:
    """Count duplicates, and find characters that leak the label of texts."""
    from data.inspection.leaks import check_leaks
    from data.remote.config import folder_or_url
    from data.shards.duplicates import find_duplicates
    from data.shards.manifest import Manifest

    folder = folder_or_url(shards)
    is_text = Manifest.load(folder).modality == "text"
    leaks = check_leaks(folder, split=split) if is_text else []
    for found in find_duplicates(folder):
        print(printable(f"duplicates: {found}"))
    if not is_text:
        return
    suspects = [leak for leak in leaks if leak.suspect is not None]
    table = _table("characters by gain", "character", "texts", "class", "gain", "suspect")
    for leak in leaks[: len(suspects) + _OTHER_CHARACTERS]:
        row = f"{leak.texts:,}", table_cell(leak.class_name), f"{leak.gain:+.3f}"
        table.add_row(leak.name, *row, leak.suspect or "")
    Console().print(table)
    names = ", ".join(leak.name for leak in suspects)
    if not names:
        print(printable(f"{folder}: no character leaks the label"))
        return
    print(printable(f"{folder}: suspect: {names}"))
    if strict:
        error = f"error: {folder}: {names}: remove it from the texts and write the shards again"
        print(printable(error), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def verify(
    shards: Shards,
    decode: Annotated[
        bool, typer.Option("--decode", help="also decode every image, which is slower")
    ] = False,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    """Read every byte and list all damage. Exits with code 2 if anything is damaged."""
    from data.inspection.verify import damages, recorded_losses
    from data.remote.config import folder_or_url
    from data.shards.manifest import Manifest

    folder = folder_or_url(shards)
    started = time.monotonic()
    manifest = Manifest.read(folder)
    kinds: Counter[str] = Counter()
    with connected(workers, ray), progress("verifying") as report:
        found = list(
            damages(folder, report, manifest=manifest, decode=decode, workers=workers, ray=ray)
        )
    for damage in found:
        print(printable(f"damaged: {damage.line}"), file=sys.stderr)
        kinds[damage.kind] += damage.count
    if found:
        shown = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        print(f"found: {shown}", file=sys.stderr)
        damaged = pluralize(kinds.total(), "damaged item")
        again = "upload" if isinstance(folder, str) else "copy"
        remedy = f"{again} it again, or delete it and run kway shard again"
        print(printable(f"error: {folder} has {damaged}: {remedy}"), file=sys.stderr)
        raise typer.Exit(2)
    losses = recorded_losses(folder, manifest)
    for loss in losses:
        print(printable(f"recorded during indexing: {folder}: {loss}"), file=sys.stderr)
    size = sum(shard.bytes for shard in manifest.shards)
    speed = size / 1e6 / max(time.monotonic() - started, 1e-9)
    took = f"{seconds_since(started)}, {speed:,.0f} MB/s"
    state = "matches its index" if losses else "is intact"
    print(printable(f"{folder} {state}: {summary(manifest)}, {took}"))


@app.command()
def show(
    shards: Shards,
    split: Annotated[
        str | None, typer.Option(help="split to show examples from; default: the first split")
    ] = None,
    sheet: Annotated[
        Path | None,
        typer.Option(
            "--contact-sheet", metavar="FILE.png", help="output file for a contact sheet of images"
        ),
    ] = None,
) -> None:
    """Print counts, samples per class and example texts, or write a contact sheet."""
    import numpy as np

    from data.inspection.show import contact_sheet, texts
    from data.remote.config import folder_or_url
    from data.shards.manifest import Manifest
    from data.shards.split import open_split

    folder = folder_or_url(shards)
    manifest = Manifest.load(folder)
    if sheet is not None and (sheet.suffix.lower() != ".png" or manifest.modality == "text"):
        is_png = sheet.suffix.lower() == ".png"
        why = "texts have no contact sheet" if is_png else "pass a file name that ends in .png"
        raise ValueError(f"--contact-sheet {sheet}: {why}")
    console = Console()
    with open_split(folder, split or manifest.splits[0], manifest=manifest) as opened:
        kind = "texts" if manifest.modality == "text" else "images"
        source = manifest.source.kind
        title = f"{folder}: {kind} of {len(manifest.classes):,} classes, from {source}"
        table = _table(title, "split", "samples", "classes", "shards", "MB", "bytes/sample")
        counts = np.zeros(len(manifest.classes), np.int64)
        for name in manifest.splits:
            shards_of_split = manifest.of_split(name)
            size = sum(shard.bytes for shard in shards_of_split)
            with open_split(folder, name, manifest=manifest) as one:
                samples, found, offsets = len(one), one.class_counts(), one.offsets
            counts += found
            without = 0 if offsets is None else np.count_nonzero(np.diff(offsets) == 0)
            no_class = f" ({without:,} without a class)" if without else ""
            table.add_row(
                table_cell(name),
                f"{samples:,}{no_class}",
                f"{np.count_nonzero(found):,}",
                f"{len(shards_of_split):,}",
                f"{size / 1e6:,.1f}",
                f"{size / samples:,.0f}",
            )
        console.print(table)
        console.print(_class_table(manifest.class_names, counts))
        if manifest.modality == "text":
            table = _table(f"texts of {opened.name}")
            for name, text in texts(opened, _NUM_TEXTS):
                table.add_row(table_cell(name), table_cell(text, 200))
            console.print(table)
        if sheet is not None:
            with explain_write_errors(sheet, "--contact-sheet"):
                contact_sheet(opened, _NUM_IMAGES).save(sheet, "PNG")
            print(printable(f"{sheet}: {opened.name}"))


def _class_table(names: Sequence[str], counts: "np.ndarray") -> Table:
    """Return a table of the samples per class; with many classes, of the largest and smallest."""
    shown = list(range(len(counts)))
    if len(counts) > _ALL_CLASSES:
        order = (-counts).argsort(kind="stable").tolist()
        shown = order[:_ENDS] + order[-_ENDS:]
    longest = max(1, counts.max())
    table = _table("samples per class")
    for label in shown:
        bar = "█" * -(-counts[label] * _BAR // longest)
        table.add_row(table_cell(names[label]), f"{counts[label]:,}", bar)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        show_header=bool(columns),
    )
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    return table


@app.command()
def index(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="folder of plain webdataset tars")
    ],
    classes: Annotated[
        Path | None,
        typer.Option(help="file with one class name per line; default: the labels in the tars"),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=GLOB",
            help="tars that belong to a split; default: derived from file names; can be repeated",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="extension of the images or texts, if there are several candidates"),
    ] = None,
    label_from: Annotated[
        str | None,
        typer.Option(metavar="EXT", help="extension of the labels; default: cls, otherwise json"),
    ] = None,
    label_field: Annotated[
        str, typer.Option(help="field of a .json label that contains the class")
    ] = "label",
    label_sets: Annotated[
        bool,
        typer.Option(
            "--label-sets",
            help="each sample has a set of labels: a list in a .json field, or labels with spaces "
            "between them in .cls",
        ),
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="skip and record missing or damaged samples"),
    ] = False,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    """Create an offset index and a manifest for existing webdataset tars."""
    from data.skipped import NAMED
    from data.tars.indexing import index_shards

    started = time.monotonic()
    splits = [text.partition("=") for text in split or []]
    for parts in splits:
        if not all(parts):
            raise ValueError(f"--split {''.join(parts)}: pass NAME=GLOB, such as train=part-0*.tar")
    with connected(workers, ray), progress("indexing", "MB") as report:
        indexed = index_shards(
            folder,
            classes=classes,
            splits=[(name, glob) for name, _, glob in splits],
            sample=sample,
            label=label_from,
            label_field=label_field,
            label_sets=label_sets,
            skip_bad=skip_bad,
            workers=workers,
            ray=ray,
            report=lambda done, total: report(done // 10**6, total // 10**6),
        )
    for note in indexed.notes:
        print(printable(f"note: {folder}: {note}"), file=sys.stderr)
    for problem in indexed.problems[:NAMED]:
        print(f"skipped: {problem}", file=sys.stderr)
    if indexed.problems:
        problems = pluralize(len(indexed.problems), "problem")
        print(f"warning: ignored {problems}", file=sys.stderr)
    if indexed.skipped is not None:
        print_skipped(indexed.skipped)
    print(printable(f"{folder}: {summary(indexed.manifest)}, {seconds_since(started)}"))

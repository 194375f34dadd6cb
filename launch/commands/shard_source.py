"""`kway shard NAME`: derives the command of a source from its class, and writes its shards.

Options, bounds and help come from the fields and the docstring of the class (`launch/options.py`).
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from data.messages import pluralize, printable
from data.remote.config import is_url
from data.shards.duplicates import find_duplicates
from data.shards.writing.output import OutputFolder
from data.sources import SOURCES, Source
from data.sources.first_pass import work_folder
from data.sources.label_vectors import WithLabelVectors
from launch.options import Given, RayAddress, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.shard_runs import Workers, connected, print_skipped, summary
from launch.terminal import Report, progress, seconds_since

if TYPE_CHECKING:
    import numpy as np

    from data.skipped import Skipped


Vectors = Annotated[
    Path | None,
    typer.Option(
        help="file of label vectors by class name: word2vec .bin, fastText .vec, GloVe .txt (also "
        ".gz), or .npz with names"
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER|URL",
        help="output folder, or its URL, such as s3://bucket/shards",
    ),
]
SAMPLES_PER_SHARD = 10_000
PerShard = Annotated[int, typer.Option(min=1, help="maximum number of samples per shard")]


def source_commands() -> dict[str, Any]:
    """Map names to commands."""
    app = typer.Typer()
    for kind, source_class in SOURCES.items():
        add = app.command(kind, help=_help(source_class), epilog=_epilog(source_class))
        add(_command(source_class))
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return commands


def _help(source_class: type[Source]) -> str:
    """Return the class's docstring with each paragraph on one line, because typer wraps lines."""
    paragraphs = (inspect.getdoc(source_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _epilog(source_class: type[Source]) -> str:
    return f"Reads {source_class.reads}. Held out: {source_class.held_out}."


def _command(source_class: type[Source]) -> Callable[..., None]:
    return with_options(partial(_shard, source_class), options_of(source_class))


def _shard(
    source_class: type[Source],
    given: Given,
    out: Out,
    vectors: Vectors = None,
    samples_per_shard: PerShard = SAMPLES_PER_SHARD,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    output = OutputFolder(out)
    task = ("reading", "bytes") if source_class.reads_first else ("listing", "classes")
    with connected(workers, ray), progress(*task) as report:
        source = _source(source_class, given, work_folder(output.folder), workers, ray, report)
        if (line := source.announcement()) is not None:
            print(printable(line), file=sys.stderr)
        with_vectors = None if vectors is None else WithLabelVectors(source, vectors, _find)
        if not source.reads_first:
            _print_notes(source)
            if with_vectors is not None:
                with_vectors.label_vectors()  # report a bad file before writing anything
        try:
            write(
                source,
                output.folder,
                samples_per_shard=samples_per_shard,
                workers=workers,
                ray=ray,
                vectors=with_vectors,
                notes=source.notes if source.reads_first else tuple,
                ignored=source.skipped(),
            )
        except ValueError:
            source.clean_up()  # the input must be fixed first, so this run cannot be resumed
            raise
        source.clean_up()
    if source.compares_splits and isinstance(output.folder, Path):
        _print_duplicates(output.folder)


def _source(
    source_class: type[Source],
    given: Given,
    work: Path,
    workers: int | None,
    ray: str | None,
    report: Report,
) -> Source:
    values = {
        **given,
        "work": work,
        "workers": workers,
        "ray": ray,
        "report": report,
    }
    fields = source_class.__pydantic_fields__.keys()  # type: ignore[attr-defined]
    return build(source_class, {name: values[name] for name in values if name in fields})


def _find(file: Path, names: Sequence[str]) -> "tuple[np.ndarray, list[str]]":
    from heads.tree import load_label_vectors

    return load_label_vectors(file, names, missing="zero")


def _print_notes(source: Source) -> None:
    for note in source.notes():
        print(printable(f"note: {source.origin}: {note}"), file=sys.stderr)


def _print_duplicates(out: Path) -> None:
    """Print one line per split that repeats its own samples or contains training samples."""
    found = find_duplicates(out)
    for split in found:
        if split.in_training or split.repeated:
            print(printable(f"duplicates: {split}"))
    if any(split.in_training for split in found):
        print("to train without them, delete the copies in the input and pass another --out")


def write(
    source: Source,
    out: Path | str,
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    workers: int | None = None,
    ray: str | None = None,
    vectors: WithLabelVectors | None = None,
    notes: Callable[[], Iterable[str]] = tuple,
    ignored: Sequence["Skipped"] = (),
) -> None:
    """Write the shards of `source`, and print a summary.

    vectors: `source` with label vectors from a file instead of its own. notes: a function that is
    called after writing and returns lines to print. ignored: files that the source does not read.
    """
    from data.shards.writing.writer import write_shards

    started = time.monotonic()
    explained = nullcontext() if is_url(out) else explain_write_errors(Path(out), "--out")
    with progress("writing") as report, explained:
        written = write_shards(
            vectors or source,
            out,
            samples_per_shard=samples_per_shard,
            workers=workers,
            ray=ray,
            ignored=ignored,
            report=report,
        )
    manifest = written.manifest
    if written.skipped is not None:
        print_skipped(written.skipped)
    if written.complete_before:
        print(printable(f"{out} is already complete: {summary(manifest)}"))
        return
    of_vectors = () if vectors is None else vectors.notes()
    for note in chain(notes(), of_vectors):
        print(printable(f"note: {note}"), file=sys.stderr)
    if written.resumed:
        print(f"resumed after {pluralize(written.resumed, 'complete shard')}")
    if written.num_skipped:
        bad = pluralize(written.num_skipped, f"bad {manifest.modality}")
        print(f"warning: skipped {bad}", file=sys.stderr)
    print(printable(f"{out}: {summary(manifest)}, {seconds_since(started)}"))

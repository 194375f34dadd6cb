"""`kway shard NAME`: derives the command of a source from its class, and writes its shards.

Options, bounds and help come from the fields and the docstring of the class (`launch/options.py`).
"""

import inspect
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from data.messages import pluralize, printable
from data.shards.writing.output import OutputFolder
from data.skipped import by_reason
from data.sources import SOURCES, Source
from data.sources.first_pass import work_folder
from data.sources.label_vectors import VectorFile
from launch.options import Given, RayAddress, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.shard_runs import Workers, connected, print_skipped, summary
from launch.terminal import progress, seconds_since

if TYPE_CHECKING:
    from data.shards.writing.writer import Written


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
PerShard = Annotated[int, typer.Option(min=1, help="maximum number of samples per shard")]


def source_commands() -> dict[str, Any]:
    """Map names to commands."""
    app = typer.Typer()
    for kind, source_class in SOURCES.items():
        # One line per paragraph, because typer wraps lines.
        paragraphs = (inspect.getdoc(source_class) or "").split("\n\n")
        about = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        epilog = f"Reads {source_class.reads}. Held out: {source_class.held_out}."
        command = with_options(partial(_shard, source_class), options_of(source_class))
        app.command(kind, help=about, epilog=epilog)(command)
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return commands


def _shard(
    source_class: type[Source],
    given: Given,
    out: Out,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    from data.shards.writing.writer import write_shards

    started = time.monotonic()
    folder = OutputFolder(out).folder
    task = ("reading", "bytes") if source_class.reads_first else ("listing", "classes")
    with connected(workers, ray), progress(*task) as report:
        supplied = {"work": work_folder(folder), "workers": workers, "report": report}
        fields = source_class.__pydantic_fields__.keys()  # type: ignore[attr-defined]
        source = build(
            source_class, {**given, **{k: supplied[k] for k in supplied.keys() & fields}}
        )
        if (line := source.announcement()) is not None:
            print(printable(line), file=sys.stderr)
        vector_file = None
        if vectors is not None:
            from heads.tree import load_label_vectors

            vector_file = VectorFile(vectors, partial(load_label_vectors, missing="zero"))
        if not source.reads_first:
            _print_notes([*source.notes(), *by_reason(source.skipped())])
            if vector_file is not None:
                vector_file.of(source.classes())  # report a bad file before writing anything
        explained = (
            explain_write_errors(folder, "--out") if isinstance(folder, Path) else nullcontext()
        )
        try:
            with progress("writing") as report, explained:
                written = write_shards(
                    source,
                    folder,
                    samples_per_shard=samples_per_shard,
                    workers=workers,
                    ray=ray,
                    vectors=vector_file,
                    ignored=source.skipped(),
                    report=report,
                )
        except ValueError:
            source.clean_up()  # the input must be fixed first, so this run cannot be resumed
            raise
        if not written.complete_before:
            _print_notes(source.notes() if source.reads_first else ())
            _print_notes(() if vector_file is None else vector_file.notes)
        source.clean_up()
    _print_result(written, folder, started)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(printable(f"note: {note}"), file=sys.stderr)


def _print_result(written: "Written", out: Path | str, started: float) -> None:
    manifest = written.manifest
    if written.skipped is not None:
        print_skipped(written.skipped)
    if written.complete_before:
        print(printable(f"{out} is already complete: {summary(manifest)}"))
        return
    if written.resumed:
        print(f"resumed after {pluralize(written.resumed, 'complete shard')}")
    if written.num_skipped:
        bad = pluralize(written.num_skipped, f"bad {manifest.modality}")
        print(f"warning: skipped {bad}", file=sys.stderr)
    print(printable(f"{out}: {summary(manifest)}, {seconds_since(started)}"))

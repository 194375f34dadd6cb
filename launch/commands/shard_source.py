"""`kway shard NAME`: derives the command of a source from its class, and writes its shards.

Options, bounds and help come from the fields and the docstring of the class (`launch/options.py`).
"""

import hashlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from data.messages import pluralize, printable, silent
from data.remote.config import is_url
from data.remote.input_path import input_path
from data.shards.duplicates import find_duplicates
from data.shards.writing.output import OutputFolder
from data.sources import SOURCES, CommandSource, Source
from data.sources.label_vectors import WithLabelVectors
from launch.commands.shard import Workers, connected, print_skipped, summary
from launch.options import Given, RayAddress, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.terminal import Report, progress, seconds_since

if TYPE_CHECKING:
    import numpy as np

    from data.skipped import Skipped


Vectors = Annotated[
    Path | None,
    typer.Option(
        help="file of label vectors by class name: word2vec .bin, fastText .vec, GloVe .txt (also "
        ".gz), or .npz or .safetensors with names"
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER|URL",
        help="output folder, or its URL, such as s3://bucket/shards; required without --preview",
    ),
]
Preview = Annotated[
    bool,
    typer.Option(
        "--preview",
        help="print the splits, classes, examples and ignored files, and write nothing",
    ),
]
SAMPLES_PER_SHARD = 10_000
PerShard = Annotated[int, typer.Option(min=1, help="maximum number of samples per shard")]


def source_commands() -> dict[str, Any]:
    """Map names to commands. Sources that only read folders for another source are omitted."""
    app = typer.Typer()
    replacements = {source_class.for_folder for source_class in SOURCES.values()}
    for kind, source_class in SOURCES.items():
        if source_class not in replacements:
            add = app.command(kind, help=_help(source_class), epilog=_epilog(source_class))
            add(_command(source_class))
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return commands


def _help(source_class: type[CommandSource]) -> str:
    """Return the class's docstring with each paragraph on one line, because typer wraps lines."""
    paragraphs = (inspect.getdoc(source_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _epilog(source_class: type[CommandSource]) -> str:
    return f"Reads {source_class.reads}. Held out: {source_class.held_out}."


def _command(source_class: type[CommandSource]) -> Callable[..., None]:
    return with_options(partial(_shard, source_class), _all_options(source_class))


def _shard(
    source_class: type[CommandSource],
    given: Given,
    out: Out = None,
    preview: Preview = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = SAMPLES_PER_SHARD,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    source_class = _reader_of(source_class, given)
    if preview:
        with connected(workers, ray):
            _preview(source_class, given, workers, ray, vectors)
        return
    if out is None:
        raise ValueError("-o/--out is missing: pass an output folder, or --preview")
    output = OutputFolder(out)
    task = ("reading", "bytes") if source_class.reads_first else ("listing", "classes")
    with connected(workers, ray), progress(*task) as report:
        source = _source(source_class, given, _work(output), workers, ray, report)
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
    if source.compares_splits:
        _print_duplicates(output.folder)


def _work(output: OutputFolder) -> Path:
    """Return the local folder for the result of a first pass."""
    folder = output.folder
    if isinstance(folder, Path):
        folder = Path(os.path.abspath(folder))  # `.` has no name
        return folder.with_name(f"{folder.name}.first-pass")
    # Folders in different buckets may have the same name.
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return Path(f"{folder.rpartition('/')[2]}-{digest}.first-pass")


def _preview(
    source_class: type[CommandSource],
    given: Given,
    workers: int | None,
    ray: str | None,
    vectors: Path | None,
) -> None:
    """Print what would be written. The result of a first pass is stored in a temporary folder."""
    from launch.commands.shard_preview import print_preview

    with tempfile.TemporaryDirectory(prefix="kway-preview-") as folder:
        source = _source(source_class, given, Path(folder) / "first-pass", workers, ray, silent)
        with_vectors = None if vectors is None else WithLabelVectors(source, vectors, _find)
        print_preview(source, vectors=with_vectors)


def _all_options(source_class: type[CommandSource]) -> dict[str, Any]:
    """Return the options of the source and, if it has one, of its replacement for folders."""
    options = options_of(source_class)
    if (instead := source_class.for_folder) is None:
        return options
    return {**{n: o for n, o in options_of(instead).items() if n != "folder"}, **options}


def _reader_of(source_class: type[CommandSource], given: Given) -> type[CommandSource]:
    """Return the class that reads the input: `source_class` or its replacement for folders.

    Raises ValueError if options of the other class are given.
    """
    instead = source_class.for_folder
    if instead is None:
        return source_class
    files = [input_path(text) for text in given["files"]]
    if len(files) == 1 and files[0].is_dir():
        why = f"only for {source_class.reads}, but {files[0]} is {instead.reads}"
        given["folder"] = given.pop("files")[0]
        _reject(given, source_class, instead, why)
        return instead
    _reject(given, instead, source_class, f"only for {instead.reads}, not for {source_class.reads}")
    return source_class


def _reject(given: Given, other: type, chosen: type, why: str) -> None:
    options = options_of(other)
    names = sorted(options[name].names for name in given.keys() - options_of(chosen).keys())
    if names:
        raise ValueError(f"{', '.join(names)}: {why}")


def _source(
    source_class: type[CommandSource],
    given: Given,
    work: Path,
    workers: int | None,
    ray: str | None,
    report: Report,
) -> CommandSource:
    values = {
        **given,
        "work": work,
        "workers": workers,
        "ray": ray,
        "report": report,
    }
    if "taxonomy" in given:
        from heads.tree import read_wordnet

        values["taxonomy"] = read_wordnet(given["taxonomy"])
    fields = source_class.__pydantic_fields__.keys()  # type: ignore[attr-defined]
    return build(source_class, {name: values[name] for name in values if name in fields})


def _find(file: Path, names: Sequence[str]) -> "tuple[np.ndarray, list[str]]":
    from heads.tree import load_label_vectors

    return load_label_vectors(file, names, missing="zero")


def _print_notes(source: CommandSource) -> None:
    for note in source.notes():
        print(printable(f"note: {source.origin}: {note}"), file=sys.stderr)


def _print_duplicates(out: Path | str) -> None:
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
    if written.repaired is not None:
        repaired = pluralize(written.num_repaired, "sample")
        print(printable(f"repaired {repaired}, listed in {written.repaired}"), file=sys.stderr)
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

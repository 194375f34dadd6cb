"""`kway query`: single-class queries to a bundle in this process or to a running server."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.messages import printable
from launch.options import AllowImport
from launch.terminal import table_cell

if TYPE_CHECKING:
    from serving.answer import Question
    from serving.model import Model
    from serving.schemas import Answer, ClassThreshold

# Texts, or crops of images, in one forward pass.
_BATCH = 16
# Maximum number of characters of a text in the table.
_SHOWN = 60

# A server's address without its scheme: `localhost`, or a host with a port.
_LIKE_A_SERVER = re.compile(r"(localhost|[\w.-]+:\d+|\[[\da-fA-F:]+\](:\d+)?)(/.*)?")

# Image files, or texts.
Inputs = Sequence[Path] | Sequence[str]


def query(
    source: Annotated[
        str, typer.Argument(help="folder of a bundle, or URL of a server", metavar="BUNDLE|URL")
    ],
    classes: Annotated[
        list[str], typer.Option("--class", help="name of a class, or # and its number; repeatable")
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(help="files of images", metavar="IMAGE")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="a text, where the model reads texts; repeatable")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="file with a text a line")] = None,
    recall: Annotated[
        float | None,
        typer.Option(help="yes or no by each class's threshold for this recall"),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="yes or no by this score")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token that the server asks for")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Ask whether images, or texts, are of a class.

    Without --recall and --threshold only scores are shown.
    """
    inputs = _inputs(images or [], text or [], texts)
    if "://" in source:
        found = _ask_server(source, classes, inputs, recall, threshold, token_file)
    elif token_file is not None:
        raise ValueError(
            f"{source} is no URL, and only a server asks for a token: drop one of them"
        )
    else:
        _check_source(source)
        found = _ask_bundle(Path(source), classes, inputs, recall, threshold, allow_import or [])
    if as_json:
        typer.echo(json.dumps(found.model_dump(), ensure_ascii=False, indent=1))
    else:
        _print_table(found, inputs)


def _check_source(source: str) -> None:
    if _LIKE_A_SERVER.fullmatch(source) and not Path(source).exists():
        raise ValueError(
            f"there is no folder {source}, and a server's address starts with http:// or "
            f"https://: give http://{source}"
        )


def _inputs(images: list[Path], text: list[str], texts: Path | None) -> Inputs:
    for image in images:
        if not image.is_file():
            raise FileNotFoundError(f"{image} is no file: name images")
    if texts is not None:
        text = text + _lines(texts)
    if bool(images) == bool(text):
        raise ValueError("give images, or texts by --text or --texts, and not both")
    return images or text


def _lines(file: Path) -> list[str]:
    lines = _read(file, "--texts").split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{file} holds no text: write one a line")
    return [line.removesuffix("\r") for line in lines]


def _read(file: Path, option: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{option} {file} cannot be read ({error.strerror}): name a file that you may read"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} {file} is not UTF-8 from its byte {error.start} on: save it as UTF-8"
        ) from error


def _check_kind(source: str, reads: str, inputs: Inputs) -> None:
    if reads != ("images" if isinstance(inputs[0], Path) else "texts"):
        remedy = "name image files" if reads == "images" else "give --text or --texts"
        raise ValueError(f"{source} reads {reads}: {remedy}")


def _ask_bundle(
    bundle: Path,
    classes: list[str],
    inputs: Inputs,
    recall: float | None,
    threshold: float | None,
    allow_imports: list[str],
) -> "Answer":
    from serving.answer import ask
    from serving.client import joined
    from serving.model import Model
    from trainer.bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    _check_kind(str(bundle), opened.spec.reads, inputs)
    opened.verify(class_weights=False)  # a query reads only a few rows of a possibly huge file
    model = Model(opened, allow_imports=allow_imports)
    question = ask(model.bundle, classes, recall=recall, threshold=threshold)
    size = max(1, _BATCH // model.crops)
    parts = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    return joined([_answer(model, question, part) for part in parts])


def _answer(model: "Model", question: "Question", inputs: Inputs) -> "Answer":
    prepared = []
    for one in inputs:
        try:
            prepared.append(model.prepare(one.read_bytes() if isinstance(one, Path) else one))
        except ValueError as error:
            raise ValueError(f"{str(one)[:_SHOWN]}: {error}") from error
    return model.answer(prepared, question)


def _ask_server(
    url: str,
    classes: list[str],
    inputs: Inputs,
    recall: float | None,
    threshold: float | None,
    token_file: Path | None,
) -> "Answer":
    from serving.client import Client, RejectedError

    token = None if token_file is None else _token(token_file)
    with Client(url, token=token) as client:
        try:
            served = client.served()
        except RejectedError as error:
            if error.code == "no_token":
                raise ValueError(f"{url} asks for a token: give --token-file FILE") from error
            raise
        _check_kind(url, served.reads, inputs)
        return client.query(classes, inputs, recall=recall, threshold=threshold, served=served)


def _token(file: Path) -> str:
    """The first token in a token file of `kway serve`. On the command line it would be visible to
    all users of the machine."""
    for line in _read(file, "--token-file").splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise ValueError(f"{file} holds no token: write one on a line of its own")


def _print_table(found: "Answer", inputs: Inputs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("image" if isinstance(inputs[0], Path) else "text", "class")
    verdicts = [verdict for result in found.results for verdict in result.verdicts]
    decides = any(verdict.threshold is not None for verdict in verdicts)
    for name in ("score", "threshold", "match") if decides else ("score",):
        table.add_column(name, justify="right")
    for one, result in zip(inputs, found.results, strict=True):
        shown = Text(printable(str(one))) if isinstance(one, Path) else table_cell(str(one), _SHOWN)
        for verdict in result.verdicts:
            bar = "" if verdict.threshold is None else f"{verdict.threshold:.3f}"
            word = {True: "yes", False: "no", None: ""}[verdict.match]
            asked = Text(printable(verdict.class_name))
            numbers = (f"{verdict.score:.3f}", bar, word) if decides else (f"{verdict.score:.3f}",)
            table.add_row(shown, asked, *numbers)
    console = Console()
    console.print(table)
    for one in found.thresholds:
        if one.threshold_source != "request":
            console.print(Text(printable(_in_words(one))), soft_wrap=True)
    if found.notice:
        console.print(Text(printable(f"notice: {found.notice}")))


def _in_words(one: "ClassThreshold") -> str:
    """Describe which validation samples determined a threshold, and how many reach it."""
    if one.threshold is None:
        return f"{one.class_name}: no threshold at this recall: pass --threshold"
    origin = "the class's own" if one.threshold_source == "class" else "pooled over all classes"
    if one.threshold_samples is not None:
        origin += f" ({one.threshold_samples} validation samples)"
    if one.expected_precision is None:
        shown = "expected precision unknown: the bundle was exported by an older kway"
    else:
        shown = (
            f"expected precision {one.expected_precision:.2f}; reached by {one.class_reached} of "
            f"the class's {one.class_samples} samples, and by {one.all_reached} of all classes"
        )
    return f"{one.class_name}: threshold {one.threshold:.3f}, {origin}; {shown}"

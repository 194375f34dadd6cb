"""`kway query`: one-class questions to a bundle, in this process, or to a running server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel, PositiveInt

if TYPE_CHECKING:
    import httpx

    from serving.answer import Answer

# Pictures in one forward pass.
_BATCH = 16
# What a multipart form adds to each of its pictures, generously.
_FORM_BYTES = 1000

Body = TypeVar("Body", bound=BaseModel)


class _Limits(BaseModel):
    max_inputs: PositiveInt
    max_body_bytes: PositiveInt


class _Served(BaseModel):
    """What is needed of a server's description."""

    limits: _Limits


def query(
    source: Annotated[
        str, typer.Argument(help="bundle folder, or URL of a server", metavar="BUNDLE|URL")
    ],
    pictures: Annotated[list[Path], typer.Argument(help="picture files")],
    classes: Annotated[
        list[str], typer.Option("--class", help="class name, or # and its number; repeat for more")
    ],
    recall: Annotated[
        float | None, typer.Option(help="decide by the threshold that reached this recall")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="decide by this logit")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the raw answer")] = False,
) -> None:
    """Ask whether pictures are of a class; reads one row of the classifier for each class."""
    for picture in pictures:
        if not picture.is_file():
            raise FileNotFoundError(f"{picture} is no file: name pictures")
    if source.startswith(("http://", "https://")):
        found = _ask_server(source, classes, pictures, recall, threshold)
    else:
        found = _ask_bundle(Path(source), classes, pictures, recall, threshold)
    if as_json:
        typer.echo(json.dumps(found.model_dump(), ensure_ascii=False, indent=1))
    else:
        _print_table(found, pictures)


def _ask_bundle(
    bundle: Path,
    classes: list[str],
    pictures: list[Path],
    recall: float | None,
    threshold: float | None,
) -> "Answer":
    from serving.answer import ask
    from serving.model import Model, picture_settings
    from trainer.bundle import Bundle

    opened = Bundle.open(bundle)
    picture_settings(opened)
    opened.verify(
        class_weights=False
    )  # of those a question reads a row a class, whatever their size
    model = Model(opened)
    question = ask(model.bundle, classes, recall=recall, threshold=threshold)
    parts = []
    for start in range(0, len(pictures), _BATCH):
        prepared = []
        for picture in pictures[start : start + _BATCH]:
            try:
                prepared.append(model.prepare(picture.read_bytes()))
            except ValueError as error:
                raise ValueError(f"{picture}: {error}") from error
        parts.append(model.answer(prepared, question))
    return _join(parts)


def _ask_server(
    url: str,
    classes: list[str],
    pictures: list[Path],
    recall: float | None,
    threshold: float | None,
) -> "Answer":
    import httpx

    from serving.answer import Answer

    fields: dict[str, list[str]] = {"classes": classes}
    for name, value in (("recall", recall), ("threshold", threshold)):
        if value is not None:
            fields[name] = [str(value)]
    url = url.rstrip("/")
    with httpx.Client(timeout=60) as client:
        try:
            limits = _accepted(client.get(f"{url}/v1/model"), url, _Served).limits
            parts = [
                _accepted(client.post(f"{url}/v1/query", data=fields, files=files), url, Answer)
                for files in _requests(pictures, limits.max_inputs, limits.max_body_bytes)
            ]
        except httpx.InvalidURL as error:
            raise ValueError(f"{url} is no URL: {error}") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise OSError(
                f"no answer from {url} ({reason}): is `kway serve` running there?"
            ) from error
    return _join(parts)


_Files = list[tuple[str, tuple[str, bytes]]]


def _requests(pictures: list[Path], max_inputs: int, max_bytes: int) -> Iterator[_Files]:
    """The pictures' files in requests that the server's limits allow, one request at a time."""
    files: _Files = []
    size = 0
    for picture in pictures:
        data = picture.read_bytes()
        added = len(data) + _FORM_BYTES + len(picture.name)
        if files and (len(files) == max_inputs or size + added > max_bytes):
            yield files
            files, size = [], 0
        files.append(("images", (picture.name, data)))
        size += added
    yield files


def _accepted(answer: "httpx.Response", url: str, kind: type[Body]) -> Body:
    """The body of an answer; ValueError with the server's own words for a refusal."""
    try:
        body = answer.json()
        if answer.status_code == 200:
            return kind.model_validate(body)
        reason = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {answer.status_code}, and no JSON of kway's: is it a kway server?"
    raise ValueError(f"{url} refuses: {reason}")


def _join(parts: list["Answer"]) -> "Answer":
    """One answer about all pictures, whose positions count through the batches."""
    results = [result for part in parts for result in part.results]
    numbered = [result.model_copy(update={"input": place}) for place, result in enumerate(results)]
    return parts[0].model_copy(update={"results": numbered})


def _print_table(found: "Answer", pictures: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("picture", "class")
    for name in ("logit", "threshold", "match"):
        table.add_column(name, justify="right")
    for picture, result in zip(pictures, found.results, strict=True):
        for verdict in result.verdicts:
            bar = "" if verdict.threshold is None else f"{verdict.threshold:.3f}"
            word = {True: "yes", False: "no", None: ""}[verdict.match]
            # Text: a class name may hold what rich would read as markup.
            table.add_row(
                Text(str(picture)), Text(verdict.class_name), f"{verdict.logit:.3f}", bar, word
            )
    console = Console()
    console.print(table)
    if found.notice:
        console.print(Text(f"notice: {found.notice}"))

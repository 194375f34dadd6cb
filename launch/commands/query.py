"""`kway query`: one-class questions to a bundle, in this process, or to a running server."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from serving.answer import Answer

# Pictures in one forward pass, or in one request to a server.
_BATCH = 16


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


def _batches(pictures: list[Path]) -> list[list[Path]]:
    return [pictures[start : start + _BATCH] for start in range(0, len(pictures), _BATCH)]


def _ask_bundle(
    bundle: Path,
    classes: list[str],
    pictures: list[Path],
    recall: float | None,
    threshold: float | None,
) -> "Answer":
    from serving.answer import ask
    from serving.model import Model

    model = Model.open(bundle)
    question = ask(model.bundle, classes, recall=recall, threshold=threshold)
    parts = []
    for batch in _batches(pictures):
        prepared = []
        for picture in batch:
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
    parts = []
    with httpx.Client(timeout=60) as client:
        for batch in _batches(pictures):
            files = [("images", (picture.name, picture.read_bytes())) for picture in batch]
            try:
                answer = client.post(f"{url.rstrip('/')}/v1/query", data=fields, files=files)
            except httpx.InvalidURL as error:
                raise ValueError(f"{url} is no URL: {error}") from error
            except httpx.HTTPError as error:
                raise OSError(
                    f"no answer from {url} ({error}): is `kway serve` running there?"
                ) from error
            if answer.status_code != 200:
                raise ValueError(f"{url} refuses: {_reason(answer.text)} ({_named(batch)})")
            parts.append(Answer.model_validate_json(answer.content))
    return _join(parts)


def _named(batch: list[Path]) -> str:
    more = f" … {batch[-1].name}" if len(batch) > 1 else ""
    return f"images {batch[0].name}{more}"


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.split())[:200]


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

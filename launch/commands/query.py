"""`kway query`: one-class questions to a bundle, in this process, or to a running server."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from pydantic import BaseModel, PositiveInt

from launch.wording import plain, printable

if TYPE_CHECKING:
    import httpx

    from serving.answer import Answer, Question
    from serving.model import Model

# Texts, or crops of pictures, in one forward pass.
_BATCH = 16
# What a request adds to each of its pictures or texts, generously.
_EXTRA_BYTES = 1000
# Characters of a text in the table.
_SHOWN = 60

Body = TypeVar("Body", bound=BaseModel)
# Picture files, or texts.
Inputs = Sequence[Path] | Sequence[str]


class _Limits(BaseModel):
    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt


class _Served(BaseModel):
    """What is needed of a server's description."""

    reads: Literal["pictures", "texts"]
    limits: _Limits


def query(
    source: Annotated[
        str, typer.Argument(help="bundle folder, or URL of a server", metavar="BUNDLE|URL")
    ],
    classes: Annotated[
        list[str], typer.Option("--class", help="class name, or # and its number; repeat for more")
    ],
    pictures: Annotated[list[Path] | None, typer.Argument(help="picture files")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="for a model of texts; repeat for more")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="file of texts, one a line")] = None,
    recall: Annotated[
        float | None, typer.Option(help="decide by the threshold that reached this recall")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="decide by this logit")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the raw answer")] = False,
) -> None:
    """Ask whether pictures, or texts, are of a class; reads one row of the classifier a class."""
    inputs = _inputs(pictures or [], text or [], texts)
    if source.startswith(("http://", "https://")):
        found = _ask_server(source, classes, inputs, recall, threshold)
    else:
        found = _ask_bundle(Path(source), classes, inputs, recall, threshold)
    if as_json:
        typer.echo(json.dumps(found.model_dump(), ensure_ascii=False, indent=1))
    else:
        _print_table(found, inputs)


def _inputs(pictures: list[Path], text: list[str], texts: Path | None) -> Inputs:
    for picture in pictures:
        if not picture.is_file():
            raise FileNotFoundError(f"{picture} is no file: name pictures")
    if texts is not None:
        text = text + _lines(texts)
    if bool(pictures) == bool(text):
        raise ValueError("give pictures, or texts by --text or --texts, and not both")
    return pictures or text


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 from its byte {error.start} on") from error
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{file} holds no text: write one a line")
    return [line.removesuffix("\r") for line in lines]


def _check_kind(source: str, reads: str, inputs: Inputs) -> None:
    if reads != ("pictures" if isinstance(inputs[0], Path) else "texts"):
        remedy = "name picture files" if reads == "pictures" else "give --text or --texts"
        raise ValueError(f"{source} reads {reads}: {remedy}")


def _ask_bundle(
    bundle: Path,
    classes: list[str],
    inputs: Inputs,
    recall: float | None,
    threshold: float | None,
) -> "Answer":
    from serving.answer import ask
    from serving.model import Model
    from trainer.bundle import Bundle

    opened = Bundle.open(bundle)
    _check_kind(str(bundle), opened.spec.reads, inputs)
    opened.verify(class_weights=False)  # a question reads few of those, however many there are
    model = Model(opened)
    question = ask(model.bundle, classes, recall=recall, threshold=threshold)
    size = max(1, _BATCH // model.crops)
    parts = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    return _join([_answer(model, question, part) for part in parts])


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
) -> "Answer":
    import httpx

    from serving.answer import Answer

    fields: dict[str, Any] = {"classes": classes}
    for name, value in (("recall", recall), ("threshold", threshold)):
        if value is not None:
            fields[name] = value
    url = url.rstrip("/")
    with httpx.Client(timeout=60) as client:
        try:
            served = _accepted(client.get(f"{url}/v1/model"), url, _Served)
            _check_kind(url, served.reads, inputs)
            _check_lengths(url, inputs, served.limits.max_text_chars)
            parts = [
                _accepted(client.post(f"{url}/v1/query", **request), url, Answer)
                for request in _requests(fields, inputs, served.limits)
            ]
        except httpx.InvalidURL as error:
            raise ValueError(f"{url} is no URL: {error}") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise OSError(
                f"no answer from {url} ({reason}): is `kway serve` running there?"
            ) from error
    return _join(parts)


def _check_lengths(url: str, inputs: Inputs, limit: int) -> None:
    """The server would name the place in one request of several, after it answered others."""
    for place, one in enumerate(inputs):
        if isinstance(one, str) and len(one) > limit:
            raise ValueError(
                f"texts[{place}] ({one[:_SHOWN].strip()}…) has {len(one)} characters, and {url} "
                f"takes {limit}: shorten it"
            )


def _requests(fields: dict[str, Any], inputs: Inputs, limits: _Limits) -> Iterator[dict[str, Any]]:
    """The inputs in requests that the server's limits allow, as httpx sends them, one at a time."""
    held: list[Any] = []
    size = 0
    for one in inputs:
        content = one.read_bytes() if isinstance(one, Path) else json.dumps(one)
        added = len(content) + _EXTRA_BYTES
        if held and (len(held) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield _request(fields, held)
            held, size = [], 0
        held.append((one.name, content) if isinstance(one, Path) else one)
        size += added
    yield _request(fields, held)


def _request(fields: dict[str, Any], held: list[Any]) -> dict[str, Any]:
    """Texts go as JSON, pictures as the files of a form."""
    if isinstance(held[0], str):
        content = json.dumps({**fields, "texts": held})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": fields, "files": [("images", file) for file in held]}


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
    """One answer about all inputs, whose positions count through the batches."""
    results = [result for part in parts for result in part.results]
    numbered = [result.model_copy(update={"input": place}) for place, result in enumerate(results)]
    return parts[0].model_copy(update={"results": numbered})


def _print_table(found: "Answer", inputs: Inputs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("picture" if isinstance(inputs[0], Path) else "text", "class")
    for name in ("score", "threshold", "match"):
        table.add_column(name, justify="right")
    for one, result in zip(inputs, found.results, strict=True):
        shown = Text(printable(str(one))) if isinstance(one, Path) else plain(str(one), _SHOWN)
        for verdict in result.verdicts:
            bar = "" if verdict.threshold is None else f"{verdict.threshold:.3f}"
            word = {True: "yes", False: "no", None: ""}[verdict.match]
            asked = Text(printable(verdict.class_name))
            table.add_row(shown, asked, f"{verdict.score:.3f}", bar, word)
    console = Console()
    console.print(table)
    if found.notice:
        console.print(Text(printable(f"notice: {found.notice}")))

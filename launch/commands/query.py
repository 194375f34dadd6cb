"""`kway query`: sends single-class queries to a running server, or answers them in this process.

Without classes, it shows the classes with the largest scores.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data.messages import printable
from launch.options import AllowImport
from launch.terminal import table_cell

if TYPE_CHECKING:
    from torch import Tensor

    from serving.model import Model
    from serving.schemas import Answer, Classification, ClassThreshold

# Number of texts or image crops per forward pass.
_BATCH = 16
# Maximum number of characters of a text in the table.
_SHOWN = 60

# A server's address without a scheme: `localhost`, or a host with a port.
_LIKE_A_SERVER = re.compile(r"(localhost|[\w.-]+:\d+|\[[\da-fA-F:]+\](:\d+)?)(/.*)?")

# Number of classes to show without --class.
_TOP = 5


# Image files, or texts.
Inputs = Sequence[Path] | Sequence[str]


def query(
    source: Annotated[
        str, typer.Argument(help="bundle folder, or URL of a server", metavar="BUNDLE|URL")
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(help="image files", metavar="IMAGE")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME",
            help="class name, or # followed by a class ID; can be repeated (default: the classes "
            "with the largest scores)",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, help="number of classes to show if there is no --class (default: 5)"
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="text to query; can be repeated")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="file with one text per line")] = None,
    recall: Annotated[
        float | None,
        typer.Option(help="target recall, which selects the threshold of each class"),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="minimum score of a match, the same for all classes")
    ] = None,
    require: Annotated[
        Literal["guaranteed"] | None,
        typer.Option(help="no verdict on classes whose threshold for --recall is not guaranteed"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(readable=False, help="file that contains a token for the server"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Query whether images or texts belong to given classes or, without --class, to which classes
    they belong.

    Without --recall and --threshold, only scores are printed.
    """
    inputs = _inputs(images or [], text or [], texts)
    if classes and top is not None:
        raise ValueError("--top shows the classes with the largest scores: omit it, or --class")
    rule = {"recall": recall, "threshold": threshold, "require": require}
    if "://" in source:
        found = _ask_server(source, classes, top or _TOP, inputs, rule, token_file)
    elif token_file is not None:
        raise ValueError(
            f"--token-file requires a server URL, but {source} is not a URL: omit --token-file, or "
            "pass the URL of a server"
        )
    else:
        if _LIKE_A_SERVER.fullmatch(source) and not Path(source).exists():
            raise ValueError(
                f"{source} is neither a folder nor a URL that starts with http:// or https://: "
                f"pass http://{source}"
            )
        found = _ask_bundle(Path(source), classes, top or _TOP, inputs, rule, allow_import or [])
    if as_json:
        typer.echo(json.dumps(found.model_dump(), ensure_ascii=False, indent=1))
    else:
        _print_table(found, inputs)


def _inputs(images: list[Path], text: list[str], texts: Path | None) -> Inputs:
    for image in images:
        if not image.is_file():
            raise FileNotFoundError(f"{image} is not a file: pass image files")
    if texts is not None:
        content = _read(texts, "--texts")
        if not content:
            raise ValueError(f"{texts} is empty: write one text per line")
        lines = content.removesuffix("\n").split(
            "\n"
        )  # not splitlines, which also splits at U+2028
        text = text + [line.removesuffix("\r") for line in lines]
    if bool(images) == bool(text):
        raise ValueError("pass either image files, or texts with --text or --texts")
    return images or text


def _read(file: Path, option: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{option} {file} cannot be read ({error.strerror}): pass a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} {file} contains invalid UTF-8 at byte {error.start}: save it as UTF-8"
        ) from error


def _check_kind(source: str, reads: str, inputs: Inputs) -> None:
    if reads != ("images" if isinstance(inputs[0], Path) else "texts"):
        remedy = "pass image files" if reads == "images" else "pass --text or --texts"
        raise ValueError(f"the model of {source} reads {reads}: {remedy}")


def _ask_bundle(
    bundle: Path,
    classes: list[str] | None,
    top: int,
    inputs: Inputs,
    rule: dict[str, Any],
    allow_imports: list[str],
) -> "Answer | Classification":
    from serving.answer import answer, classification, make_query, ranked
    from serving.client import joined
    from serving.model import Model
    from trainer.bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    _check_kind(str(bundle), opened.spec.reads, inputs)
    opened.verify(class_weights=False)  # a query reads only a few rows of a possibly huge file
    model = Model(opened, allow_imports=allow_imports)
    query = make_query(model.bundle, classes or (), **rule)
    size = max(1, _BATCH // model.crops)
    parts = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    features = (_features(model, part) for part in parts)
    if classes:
        return joined([answer(opened, part, query) for part in features])
    return joined(
        [classification(opened, ranked(opened, part)[:, :top], query) for part in features]
    )


def _features(model: "Model", inputs: Inputs) -> "Tensor":
    prepared = []
    for item in inputs:
        try:
            prepared.append(model.prepare(item.read_bytes() if isinstance(item, Path) else item))
        except ValueError as error:
            shown = item if isinstance(item, Path) else item[:_SHOWN]
            raise ValueError(f"{shown}: {error}") from error
    features = model.features(prepared)
    if not features.isfinite().all():
        raise ValueError(
            f"{model.bundle.path} computes features that are not finite: its weights are corrupted "
            "or training diverged: export it again"
        )
    return features


def _ask_server(
    url: str,
    classes: list[str] | None,
    top: int,
    inputs: Inputs,
    rule: dict[str, Any],
    token_file: Path | None,
) -> "Answer | Classification":
    from serving.client import Client, RejectedError

    token = None
    if token_file is not None:
        # A token on the command line would be visible to all users of the machine.
        lines = _read(token_file, "--token-file").splitlines()
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ValueError(f"{token_file} contains no token: write one token per line")
        token = tokens[0]
    with Client(url, token=token) as client:
        try:
            served = client.served()
        except RejectedError as error:
            if error.code == "no_token":
                raise ValueError(f"{url} requires a token: pass --token-file FILE") from error
            raise
        _check_kind(url, served.reads, inputs)
        if classes:
            return client.query(classes, inputs, **rule, served=served)
        return client.classify(inputs, top=top, **rule, served=served)


def _print_table(found: "Answer | Classification", inputs: Inputs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from serving.schemas import Answer

    table = Table("image" if isinstance(inputs[0], Path) else "text", "class")
    results = (
        [result.verdicts for result in found.results]
        if isinstance(found, Answer)
        else [result.classes for result in found.results]
    )
    verdicts = [verdict for result in results for verdict in result]
    decides = any(verdict.threshold is not None for verdict in verdicts)
    shows_promise = decides and not isinstance(found, Answer)
    for name in ("score", "threshold", "match") if decides else ("score",):
        table.add_column(name, justify="right")
    if shows_promise:
        table.add_column("promise")
    for item, result in zip(inputs, results, strict=True):
        text = str(item)
        shown = Text(printable(text)) if isinstance(item, Path) else table_cell(text, _SHOWN)
        for verdict in result:
            limit = "" if verdict.threshold is None else f"{verdict.threshold:.3f}"
            match = {True: "yes", False: "no", None: ""}[verdict.match]
            class_name = Text(printable(verdict.class_name))
            score = f"{verdict.score:.3f}"
            cells = (score, limit, match) if decides else (score,)
            promise = (verdict.threshold_source or "none",) if shows_promise else ()
            table.add_row(shown, class_name, *cells, *promise)
    console = Console()
    console.print(table)
    if not isinstance(found, Answer):
        return
    for threshold in found.thresholds:
        if threshold.threshold_source != "request":
            console.print(Text(printable(_in_words(threshold))), soft_wrap=True)
    if found.notice:
        console.print(Text(printable(f"notice: {found.notice}")))


def _in_words(threshold: "ClassThreshold") -> str:
    """Describe what a threshold promises, and its expected precision."""
    name, source = threshold.class_name, threshold.threshold_source
    if threshold.reason is not None:
        return f"{name}: no verdict: {threshold.reason}"
    if threshold.threshold is None:
        return f"{name}: no threshold for this recall: pass --threshold"
    what = f"{name}: threshold {threshold.threshold:.3f}"
    if source == "override":
        return f"{what}, set by the operator of the server, not guaranteed"
    recall = f"{threshold.recall or 0:.4g}"
    samples = f"{threshold.class_samples} validation samples of this class"
    passes = f"of new samples of this class pass, with confidence {threshold.confidence or 0:g}"
    if source == "guaranteed":
        promise = f"guaranteed: at least {recall} {passes} ({samples})"
    else:
        origin = "pooled over all classes" if source == "pooled" else f"from {samples}"
        promise = f"{origin}, not guaranteed"
        if threshold.pass_rate_interval is not None:
            low, high = threshold.pass_rate_interval
            promise += f": between {low:.2f} and {high:.2f} {passes}"
        if threshold.classes_below_recall is not None:
            promise += f"; {threshold.classes_below_recall:.1%} of the classes are below {recall}"
    if threshold.expected_precision is None or threshold.expected_precision_interval is None:
        unknown = "" if threshold.class_samples else ": no validation sample of this class"
        return f"{what}, {promise}; expected precision unknown{unknown}"
    low, high = threshold.expected_precision_interval
    return (
        f"{what}, {promise}; expected precision {threshold.expected_precision:.2f} ({low:.2f} to "
        f"{high:.2f}), from {threshold.class_reached} samples of the class among "
        f"{threshold.all_reached} samples that reach the threshold"
    )

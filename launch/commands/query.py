"""`kway query`: sends single-class queries to a running server, or answers them in this process.

Without classes, it shows the classes with the largest scores.
"""

import json
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
    texts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="file with one text per line"),
    ] = None,
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
        typer.Option(exists=True, dir_okay=False, help="file that contains a token for the server"),
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
    elif not Path(source).exists():
        raise FileNotFoundError(
            f"{source} does not exist: pass the folder of a bundle, or the URL of a server, which "
            "starts with http:// or https://"
        )
    else:
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
        try:
            content = texts.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 at byte {error.start}: save it as UTF-8"
            raise ValueError(f"--texts {texts} contains {reason}") from error
        if not content:
            raise ValueError(f"{texts} is empty: write one text per line")
        lines = content.removesuffix("\n").split("\n")  # splitlines also splits at U+2028
        text = text + [line.removesuffix("\r") for line in lines]
    if bool(images) == bool(text):
        raise ValueError("pass either image files, or texts with --text or --texts")
    return images or text


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
        lines = token_file.read_text(encoding="utf-8").splitlines()
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

    if isinstance(found, Answer):
        results = [result.verdicts for result in found.results]
    else:
        results = [result.classes for result in found.results]
    decides = any(verdict.threshold is not None for result in results for verdict in result)
    columns = ["score", *(["threshold", "match"] if decides else [])]
    if decides and not isinstance(found, Answer):
        columns.append("promise")
    table = Table("image" if isinstance(inputs[0], Path) else "text", "class")
    for name in columns:
        table.add_column(name, justify="left" if name == "promise" else "right")
    for item, result in zip(inputs, results, strict=True):
        text = str(item)
        shown = Text(printable(text)) if isinstance(item, Path) else table_cell(text, _SHOWN)
        for verdict in result:
            cells = {
                "score": f"{verdict.score:.3f}",
                "threshold": "" if verdict.threshold is None else f"{verdict.threshold:.3f}",
                "match": {True: "yes", False: "no", None: ""}[verdict.match],
                "promise": verdict.threshold_source or "none",
            }
            class_name = Text(printable(verdict.class_name))
            table.add_row(shown, class_name, *(cells[name] for name in columns))
    console = Console()
    console.print(table)
    if isinstance(found, Answer):
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

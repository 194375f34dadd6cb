"""`kway eval`: evaluates a run's model, optionally with per-class metrics and confusions."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from data.messages import printable
from launch.measures import is_ratio, measure_label
from launch.options import AllowImport
from launch.output_path import check_writable, explain_write_errors
from launch.terminal import table_cell

if TYPE_CHECKING:
    from trainer.evaluation import Evaluation
    from trainer.evaluation.request import EvaluationRequest


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", help="step of the checkpoint; default: the newest intact checkpoint"
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="split to evaluate; default: data.eval_split")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="recipe override, such as evaluation.batch=64; can be repeated",
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="number of processes")] = 1,
    classes: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="output CSV file with one row per class"),
    ] = None,
    confusions: Annotated[
        int, typer.Option(min=0, help="print this many of the most frequent confusions")
    ] = 0,
    allow_import: AllowImport = None,
) -> None:
    """Evaluate a run's newest checkpoint on its recipe's evaluation split."""
    from data.shards.mixture import load_manifest
    from trainer.evaluation import load_evaluation
    from trainer.evaluation.request import EvaluationRequest
    from trainer.evaluation.saved import ClassTable, write_csv

    wanted = EvaluationRequest(
        run, checkpoint, split, tuple(settings or ()), tuple(allow_import or ())
    )
    recipe, folder = wanted.recipe(), wanted.folder()
    if confusions and load_manifest(recipe.data).label_sets:
        raise ValueError(
            f"--confusions needs one label per sample, but {recipe.data.shards} has sets of "
            "labels: use --classes FILE.csv for measures per class"
        )
    if classes:
        check_writable(classes, "--classes")
    step = _evaluate(wanted, nproc)
    result = load_evaluation(folder, step=step)
    samples = f"{result.num_samples:,} samples of {recipe.data.eval_split}"
    print(printable(f"{run} at step {step:,}: {samples}"))
    Console().print(_measures(result))
    names = load_manifest(recipe.data).class_names if classes or confusions else ()
    if confusions:
        Console().print(_confused(result, names, confusions))
    if classes:
        table = ClassTable(result, names)
        with explain_write_errors(classes, "--classes"):
            write_csv(table, classes)
        print(printable(f"{len(names)} classes: {classes}"))


def _evaluate(wanted: "EvaluationRequest", num_processes: int) -> int:
    """Evaluate with this process, or with several others, and return the step.

    If the evaluation fails, this process exits with its code.
    """
    from launch.ranks.placement import Placement
    from launch.ranks.run import run_ranks
    from trainer.evaluation.__main__ import main

    with TemporaryDirectory(prefix="kway-") as folder:
        step_to = Path(folder) / "step"
        arguments = [f"--step-to={step_to}", *(f"--set={each}" for each in wanted.settings)]
        arguments += [f"--allow-import={path}" for path in wanted.allow_imports]
        if wanted.checkpoint is not None:
            arguments.append(f"--checkpoint={wanted.checkpoint}")
        if wanted.split is not None:
            arguments.append(f"--split={wanted.split}")
        arguments += ["--", str(wanted.run)]
        if num_processes == 1:
            code = main(arguments)
        else:
            code = run_ranks("trainer.evaluation", arguments, Placement(num_processes))
        if code:
            raise typer.Exit(code)
        return int(step_to.read_text(encoding="utf-8"))


def _measures(result: "Evaluation") -> Table:
    """The metrics, under the names that `checkpoint.keep_best.measure` accepts."""
    table = Table("measure", "name in recipes")
    table.add_column("value", justify="right")
    for name, value in result.metrics.items():
        shown = f"{value:.2%}" if is_ratio(name) else f"{value:.4f}"
        table.add_row(table_cell(measure_label(name)), table_cell(name), shown)
    return table


def _confused(result: "Evaluation", names: Sequence[str], num: int) -> Table:
    shown = Table(title="most confused classes", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("true class", "predicted class"):
        shown.add_column(name, overflow="fold")
    for name in ("samples", "share of class"):
        shown.add_column(name, justify="right", no_wrap=True)
    for true, predicted, samples in result.confusions[:num].tolist():
        share = samples / int(result.classes.positives[result.classes.class_ids == true])
        cells = (table_cell(names[true]), table_cell(names[predicted]))
        shown.add_row(*cells, f"{samples:,}", f"{share:.1%}")
    return shown

"""`kway demo`: the complete workflow on images rendered with matplotlib's own fonts."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from data.messages import kway_command, printable
from data.processes import handled_signals


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="output folder")] = Path("demo"),
    classes: Annotated[int, typer.Option(min=20, help="number of characters")] = 1000,
    epochs: Annotated[
        float, typer.Option(min=0.01, help="number of epochs of each training run")
    ] = 1.0,
) -> None:
    """Run the complete workflow, from shards to queries, on images of characters.

    Takes a few minutes.
    """
    from data.sources import Glyphs
    from launch.commands.export import print_kinds
    from launch.commands.shard_source import write
    from launch.demo import plots, queries, runs
    from trainer.bundle.export import export_run
    from trainer.world import open_world

    console, started = Console(highlight=False), time.monotonic()

    def announce(number: int, what: str, *command: object) -> None:
        seconds = f"{time.monotonic() - started:.0f} s"
        console.rule(f"{number}/6  {what}  ({seconds})", align="left")
        line = f"$ {kway_command(*command)}"
        console.print(line, style="bold", markup=False, soft_wrap=True)

    exit_on_signals()
    shards, bundle = out / "shards", out / "bundle"
    command = ("shard", "glyphs", "-o", shards, "--classes", classes)
    announce(1, "render characters", *command)
    write(Glyphs(classes), shards)

    for run in runs.RUNS:
        what = f"train {run.name} with {runs.NUM_PROCESSES} processes"
        overrides = run.overrides(out, shards, epochs)
        announce(2, what, "train", runs.RECIPE, "--nproc", runs.NUM_PROCESSES, *overrides)
        code = run.train(out, shards, epochs)
        if code:
            raise typer.Exit(code)

    chosen = runs.DENSE_BATCH_CE
    announce(3, "compare", "eval", chosen.folder(out))
    table, markdown = runs.comparison(out)
    (out / "comparison.md").write_text(markdown, encoding="utf-8")
    console.print(table)
    with open_world("cpu") as world:
        plots.draw(out, world, out / "comparison.png")

        announce(4, "export", "export", chosen.folder(out), "-o", bundle, "--force")
        thresholds = export_run(chosen.folder(out), bundle, world, force=True)
    print_kinds(thresholds)
    console.print(runs.THRESHOLDS_NOTE, markup=False, soft_wrap=True)

    announce(5, "serve", "serve", bundle)
    sent = queries.make_queries(shards, out / "queries")
    with queries.server(bundle, out / "server.log") as url:
        console.print(f"ready at {url}")
        announce(6, "query", "query", url, "--class", sent[0].queried_class, sent[0].image)
        verdicts = [queries.send(url, query) for query in sent]
        console.print(queries.verdict_table(sent, verdicts))
    plots_file = printable(str(out / "comparison.png"))
    done = (
        f"Done in {time.monotonic() - started:.0f} s. Plots: {plots_file}. "
        f"To query more images: {kway_command('query', bundle, '--class', 'NAME', 'IMAGE')}"
    )
    console.print(done, markup=False, soft_wrap=True)


def exit_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the demo stops its server before it exits."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in handled_signals((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, leave)

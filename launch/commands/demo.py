"""`kway demo`: the complete workflow on images rendered with matplotlib's own fonts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from data.messages import kway_command
from data.processes import handled_signals

NUM_PROCESSES = 2
_START_SECONDS, _STOP_SECONDS = 120, 60
_COLUMNS = {
    "top1": "top-1",
    "top5": "top-5",
    "sa": "SA",
    "auprc": "AUPRC",
    "precision_at_recall_0.9": "P@R 0.9",
}
_CAPTION = (
    "top-1, top-5 and SA (similarity accuracy) compare the scores of all classes. AUPRC and P@R "
    "0.9 (precision at recall 0.9) use the logit of one class alone and are means over classes."
)
_THRESHOLDS_NOTE = (
    "guaranteed: at least that fraction of new images of the class pass, with confidence 0.9. "
    "shrunk: an estimate from the class and similar classes. pooled: one threshold for all "
    "classes. A class has at most five held-out images; a guarantee for recall 0.9 requires 22."
)


@dataclass(frozen=True)
class DemoRun:
    """A combination of class weights and a loss. All other settings come from the recipe."""

    weights: str
    loss: str

    @property
    def name(self) -> str:
        return f"{self.weights} x {self.loss}"

    def folder(self, out: Path) -> Path:
        return out / "runs" / f"{self.weights}-{self.loss}"

    def overrides(self, out: Path, epochs: float) -> list[str]:
        """The overrides of the recipe `glyphs`, as arguments for `kway train`."""
        return [
            f"data.shards={json.dumps(str(out / 'shards'))}",
            f"run={json.dumps(str(self.folder(out)))}",
            f"train.duration.epochs={epochs}",
            f"head.weights.kind={self.weights}",
            f"head.loss.kind={self.loss}",
            "telemetry.log_every=50",
        ]

    def measures(self, out: Path) -> dict[str, float]:
        """The evaluation of the run's last checkpoint."""
        from trainer.checkpoints import committed_folders
        from trainer.run.folder import RunFolder

        run = RunFolder(self.folder(out))
        path = run.evaluations / f"{committed_folders(run.checkpoints)[-1].name}.json"
        measures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return measures


DENSE_CE = DemoRun("dense", "ce")
DENSE_BATCH_CE = DemoRun("dense", "batch_ce")
VTREE_CE = DemoRun("vtree", "ce")
RUNS = (DENSE_CE, DENSE_BATCH_CE, VTREE_CE)


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="output folder")] = Path("demo"),
    classes: Annotated[int, typer.Option(min=20, help="number of characters")] = 1000,
    epochs: Annotated[
        float, typer.Option(min=0.01, help="number of epochs of each training run")
    ] = 1.0,
) -> None:
    """Run the complete workflow, from shards to queries, on images of characters.

    Takes a few minutes.
    """
    console, started = Console(highlight=False), time.monotonic()
    kway = context.find_root().command

    def announce(number: int, what: str, *command: object) -> None:
        seconds = f"{time.monotonic() - started:.0f} s"
        console.rule(f"{number}/6  {what}  ({seconds})", align="left")
        line = f"$ {kway_command(*command)}"
        console.print(line, style="bold", markup=False, soft_wrap=True)

    def run(number: int, what: str, *command: object) -> None:
        announce(number, what, *command)
        if code := kway(list(map(str, command)), standalone_mode=False):
            raise typer.Exit(code)

    exit_on_signals()
    shards, bundle, report = out / "shards", out / "bundle", out / "report.html"
    run(1, "render characters", "shard", "glyphs", "-o", shards, "--classes", classes)
    for each in RUNS:
        what = f"train {each.name} with {NUM_PROCESSES} processes"
        overrides = each.overrides(out, epochs)
        run(2, what, "train", "glyphs", "--nproc", NUM_PROCESSES, *overrides)
    run(3, "compare", "report", *(each.folder(out) for each in RUNS), "-o", report)
    console.print(comparison(out))
    run(4, "export", "export", DENSE_BATCH_CE.folder(out), "-o", bundle, "--force")
    console.print(_THRESHOLDS_NOTE, markup=False, soft_wrap=True)
    announce(5, "serve", "serve", bundle)
    images = make_queries(shards, out / "queries")
    with server(bundle, out / "server.log") as url:
        console.print(f"ready at {url}")
        for image, true_class, queried in images:
            run(6, "query", "query", url, "--class", queried, "--recall", 0.9, image)
            console.print(f"The true class is {true_class}.", markup=False)
    done = (
        f"Done in {time.monotonic() - started:.0f} s. Plots of the runs: {report}. "
        f"To query more images: {kway_command('query', bundle, '--class', 'NAME', 'IMAGE')}"
    )
    console.print(done, markup=False, soft_wrap=True)


def exit_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the demo stops its server before it exits."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in handled_signals((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, leave)


def comparison(out: Path) -> Table:
    """The metrics of all runs."""
    table = Table(
        title="Accuracy on held-out styles",
        caption=_CAPTION,
        caption_justify="left",
        caption_style="none",  # rich's default, dim, is hard to read
    )
    table.add_column("class weights x loss")
    for column in _COLUMNS.values():
        table.add_column(column, justify="right")
    for run in RUNS:
        measures = run.measures(out)
        table.add_row(run.name, *(f"{measures[name]:.1%}" for name in _COLUMNS))
    return table


def make_queries(shards: Path, folder: Path, *, seed: int = 0) -> list[tuple[Path, str, str]]:
    """Select three held-out images at random and write them to `folder` as PNG files.

    Returns the file, the true class and the class to query. The first image is queried for its own
    class, the second for a random other class, and the third for the class with the most similar
    name.
    """
    import numpy as np

    from data.shards.label_vectors import load_label_vectors
    from data.shards.manifest import Manifest
    from data.shards.split import open_split

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    vectors = load_label_vectors(shards, Manifest.load(shards))
    queries = []
    with open_split(shards, "test") as split:
        names = [info.name for info in split.classes]
        for number, index in enumerate(rng.choice(len(split), 3, replace=False)):
            content, extension, label = split.read(int(index))
            path = folder / f"{number + 1}.{extension}"
            path.write_bytes(content)
            similarity = vectors @ vectors[label]
            similarity[label] = -np.inf
            other = (label + 1 + int(rng.integers(len(names) - 1))) % len(names)
            queried = [label, other, int(similarity.argmax())][number]
            queries.append((path, names[label], names[queried]))
    return queries


@contextmanager
def server(bundle: Path, log: Path) -> Iterator[str]:
    """Run `kway serve` as a subprocess on a free port. Yields its URL once it is ready."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "launch", "serve", str(bundle), "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (ready := re.search(r"ready: (\S+)", log.read_text(encoding="utf-8"))):
                if process.poll() is not None:
                    raise ValueError(f"the server exited with code {process.returncode}: see {log}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no server after {_START_SECONDS} s: see {log}")
                time.sleep(0.2)
            yield ready[1]
        finally:
            process.terminate()  # it may ignore SIGINT
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

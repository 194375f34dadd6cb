"""`kway demo`: the complete workflow on images rendered with matplotlib's own fonts."""

import json
import signal
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

    def announce(step: str, *command: object) -> None:
        console.rule(f"{step}  ({time.monotonic() - started:.0f} s)", align="left")
        line = f"$ {kway_command(*command)}"
        console.print(line, style="bold", markup=False, soft_wrap=True)

    def run(step: str, *command: object) -> None:
        announce(step, *command)
        if code := kway(list(map(str, command)), standalone_mode=False):
            raise typer.Exit(code)

    exit_on_signals()
    shards, bundle, report = out / "shards", out / "bundle", out / "report.html"
    run("1/6  render characters", "shard", "glyphs", "-o", shards, "--classes", classes)
    for each in RUNS:
        settings = {
            "data.shards": json.dumps(str(shards)),
            "run": json.dumps(str(each.folder(out))),
            "train.duration.epochs": epochs,
            "head.weights.kind": each.weights,
            "head.loss.kind": each.loss,
            "telemetry.log_every": 50,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        step = f"2/6  train {each.name} with 2 processes"
        run(step, "train", "glyphs", "--nproc", 2, *overrides)
    run("3/6  compare", "report", *(each.folder(out) for each in RUNS), "-o", report)
    console.print(comparison(out))
    run("4/6  export", "export", DENSE_BATCH_CE.folder(out), "-o", bundle, "--force")
    images = make_queries(shards, out / "queries")
    announce("5/6  serve", "serve", bundle)
    with served(bundle) as url:
        console.print(f"ready at {url}")
        for image, true_class, queried in images:
            options = ("--class", queried, "--recall", 0.9)
            run("6/6  query", "query", url, *options, image)
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


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """Serve a bundle with Ray on a free port, as `kway serve` does. Yields the URL."""
    from serving import on_ray
    from serving.addresses import with_free_ports
    from serving.config import ServingConfig

    with on_ray.running(bundle, with_free_ports(ServingConfig(port=0))) as (addresses, _):
        yield addresses.url


def comparison(out: Path) -> Table:
    """The metrics of the last step of all runs."""
    from trainer.checkpoints import committed_folders
    from trainer.run.folder import RunFolder

    table = Table(
        title="Accuracy on held-out styles",
        caption=_CAPTION,
        caption_justify="left",
        caption_style="none",  # rich's default, dim, is hard to read
    )
    table.add_column("class weights x loss")
    for column in _COLUMNS.values():
        table.add_column(column, justify="right")
    for each in RUNS:
        run = RunFolder(each.folder(out))
        path = run.evaluations / f"{committed_folders(run.checkpoints)[-1].name}.json"
        measures = json.loads(path.read_text(encoding="utf-8"))
        table.add_row(each.name, *(f"{measures[name]:.1%}" for name in _COLUMNS))
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

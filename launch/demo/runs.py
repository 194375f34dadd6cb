"""The demo's training runs, and the table that compares them."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from launch.ranks.placement import Placement
from launch.ranks.run import run_ranks
from launch.shipped import RECIPES
from trainer.checkpoints import committed_folders
from trainer.run.folder import RunFolder

RECIPE = "glyphs"
NUM_PROCESSES = 2


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

    def overrides(self, out: Path, shards: Path, epochs: float) -> list[str]:
        """The overrides of the recipe, as arguments for `kway train`."""
        return [
            f"data.shards={json.dumps(str(shards))}",
            f"run={json.dumps(str(self.folder(out)))}",
            f"train.duration.epochs={epochs}",
            f"head.weights.kind={self.weights}",
            f"head.loss.kind={self.loss}",
            "telemetry.log_every=50",
        ]

    def train(self, out: Path, shards: Path, epochs: float) -> int:
        """Train with two processes, resuming from the newest checkpoint. Returns the exit code."""
        placement = Placement(NUM_PROCESSES)
        arguments = [str(RECIPES / f"{RECIPE}.yaml"), *self.overrides(out, shards, epochs)]
        return run_ranks("trainer", [*placement.trainer_options, "--", *arguments], placement)

    def measures(self, out: Path) -> dict[str, float]:
        """The evaluation of the run's last checkpoint."""
        run = RunFolder(self.folder(out))
        path = run.evaluations / f"{committed_folders(run.checkpoints)[-1].name}.json"
        measures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return measures


DENSE_CE = DemoRun("dense", "ce")
DENSE_BATCH_CE = DemoRun("dense", "batch_ce")
VTREE_CE = DemoRun("vtree", "ce")
RUNS = (DENSE_CE, DENSE_BATCH_CE, VTREE_CE)

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

THRESHOLDS_NOTE = (
    "guaranteed: at least that fraction of new images of the class pass, with confidence 0.9. "
    "shrunk: an estimate from the class and similar classes. pooled: one threshold for all "
    "classes. A class has at most five held-out images; a guarantee for recall 0.9 requires 22."
)


def comparison(out: Path) -> tuple[Table, str]:
    """The metrics of all runs, as a table for the terminal and as a Markdown table."""
    table = Table(
        title="Accuracy on held-out styles",
        caption=_CAPTION,
        caption_justify="left",
        caption_style="none",  # rich's default, dim, is hard to read
    )
    header = ["class weights x loss", *_COLUMNS.values()]
    lines = [" | ".join(header), " | ".join(["---"] * len(header))]
    for column in header:
        table.add_column(column, justify="left" if column == header[0] else "right")
    for run in RUNS:
        measures = run.measures(out)
        row = [run.name, *(f"{measures[name]:.1%}" for name in _COLUMNS)]
        table.add_row(*row)
        lines.append(" | ".join(row))
    return table, "".join(f"| {line} |\n" for line in lines)

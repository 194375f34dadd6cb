"""`kway eval`: measures the newest model of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launch.wording import plain, printable


def evaluate(run: Annotated[Path, typer.Argument(help="a run's folder")]) -> None:
    """Evaluate a run's newest checkpoint on its recipe's evaluation split."""
    from data import open_split
    from trainer.evaluation import evaluate_split, save_evaluation
    from trainer.trained import open_trained
    from trainer.world import open_world

    console = Console(stderr=True)
    bar = Progress(console=console, disable=not console.is_interactive, transient=True)
    with open_world() as world:
        trained = open_trained(run, world)
        recipe = trained.recipe
        data = recipe.data
        with open_split(data.shards, data.eval_split, cache=data.cache) as split:
            task = bar.add_task("evaluating", total=len(split))
        with bar:
            result = evaluate_split(
                trained.task,
                recipe,
                world,
                label_vectors=trained.label_vectors,
                progress=lambda samples: bar.advance(task, samples),
            )
        save_evaluation(trained.folder.evaluations, result, step=trained.step)
    table = Table("measure", "value")
    for name, value in result.metrics.items():
        table.add_row(plain(name), f"{value:.4f}")
    samples = f"{result.num_samples} samples of {recipe.data.eval_split}"
    print(printable(f"{run} at step {trained.step}: {samples}"))
    Console().print(table)

"""Quality of models whose class rows are float32, bf16 or fp8.

    python -m experiments.row_types glyphs cifar100=FILE tweets=TABLE

FILE is the binary version of CIFAR-100 (`cifar-100-binary.tar.gz`), and TABLE is the table of
TweetEval's emoji task (docs/layouts.md). glyphs needs no download. A small network is trained with
several seeds for each row type and update of the rows. The seed determines the initial weights and
the order of the samples, so runs are paired by their seed.

The learning rates are those with the highest top-1 accuracy on a validation split, for float32 rows
and a seed that is not compared. All row types use the same rates.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import CONSOLE, machine
from data.shards.writing.writer import write_shards
from data.sources import Cifar100, Glyphs, Tweets
from data.sources.source import Source
from data.text.tokenizer_training import train_tokenizer
from experiments.networks import register_networks
from experiments.papers.shards import Dataset, ModifiedSource
from trainer.recipe import build_recipe
from trainer.run.folder import RunFolder
from trainer.train import train
from trainer.world import World, open_world

MEASURES = {"top1": "top-1", "auprc": "AUPRC"}
_VOCABULARY = 20_000
_SEARCH_SEED = 0


@dataclass(frozen=True)
class Problem:
    """A dataset and a recipe without `run` and `data.shards`.

    `opened(work)` returns the source, which may write to the folder `work`. `changes` are the
    arguments of a `Dataset`. `rates` are the candidates for the learning rate, and `fused_rates`
    those for the rows if they are updated by `FusedSGD`.
    """

    opened: Callable[[Path], Source]
    changes: Mapping[str, Any]
    recipe: Mapping[str, Any]
    steps: int
    rates: Sequence[float]
    fused_rates: Sequence[float]
    text: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """A row type and an update: the optimizer of the recipe, or `FusedSGD`."""

    dtype: str
    fused: bool

    def update(self, problem: Problem) -> str:
        return "fused SGD" if self.fused else str(problem.recipe["optimizer"]["kind"])


ARMS = (Arm("fp32", False), Arm("bf16", False), *(Arm(d, True) for d in ("fp32", "bf16", "fp8")))
Scores = dict[str, float]


def glyphs() -> Problem:
    """1,000 characters in font styles that are not in the training split, and a ResNet."""
    network = {
        "model_type": "resnet",
        "num_channels": 1,
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 64, 128],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
    }
    return Problem(
        lambda work: Glyphs(1000, size=16),
        {"validation": 2_000},
        {
            "data": {
                "image": {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]},
                "augment": {"crop_area": [0.7, 1.0], "crop_ratio": [0.8, 1.25], "flip": 0},
            },
            "backbone": {"config": network},
            "optimizer": {"kind": "sgd", "nesterov": True},
            "schedule": {"kind": "cosine", "warmup": {"steps": 50}},
            "train": {"global_batch": 128},
        },
        steps=400,
        rates=(0.1, 0.2, 0.4),
        fused_rates=(1.0, 3.0, 10.0),
    )


def cifar100(file: Path) -> Problem:
    """CIFAR-100 at 8 x 8 pixels, and an MLP with two layers of 500 units."""
    mean, std = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]
    return Problem(
        lambda work: Cifar100(file),
        {"side": 8, "validation": 5_000},
        {
            "data": {
                "image": {"size": 8, "mean": mean, "std": std},
                "augment": {"crop_area": None, "flip": 0.5},
            },
            "backbone": {"config": {"model_type": "mlp", "image_size": 8, "num_channels": 3}},
            "optimizer": {"kind": "sgd"},
            "schedule": {"kind": "cosine", "warmup": {"steps": 50}},
            "train": {"global_batch": 128},
        },
        steps=600,
        rates=(0.05, 0.1, 0.2),
        fused_rates=(0.3, 1.0, 3.0),
    )


def tweets(table: Path) -> Problem:
    """The emoji of tweets, and a BERT with one layer that is trained from scratch."""
    network = {
        "model_type": "bert",
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    return Problem(
        lambda work: Tweets(
            (table,), work, text="text", label="label", split="split", across="drop"
        ),
        {"validation": 5_000, "limits": {"test": 10_000}},
        {
            "backbone": {"config": network, "pooling": "mean"},
            # The decay of AdamW is not that of SGD, so the rows have none.
            "optimizer": {"kind": "adamw", "head": {"weight_decay": 0}},
            "schedule": {"kind": "linear", "warmup": {"steps": 50}},
            "train": {"global_batch": 64},
        },
        steps=400,
        rates=(1e-3, 3e-3, 1e-2),
        fused_rates=(1.0, 3.0, 10.0),
        text={"max_length": 32},
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "glyphs": glyphs,
    "cifar100": cifar100,
    "tweets": tweets,
}


class Trials:
    """Trains the recipe of `problem` on shards in `folder`, which `__init__` writes."""

    def __init__(self, problem: Problem, folder: Path, world: World) -> None:
        self.problem, self._folder, self._world = problem, folder, world
        shards = folder / "shards"
        source = problem.opened(folder / "work")
        changed = ModifiedSource(source, Dataset(source.describe().kind, **problem.changes))
        write_shards(changed, shards, workers=0)
        self._data = {**problem.recipe.get("data", {}), "shards": str(shards)}
        if problem.text:
            tokenizer = folder / "tokenizer"
            train_tokenizer(str(shards), tokenizer, vocab_size=_VOCABULARY)
            self._data["text"] = {**problem.text, "tokenizer": str(tokenizer)}

    def rates(self) -> tuple[float, float]:
        """Return the learning rate of the recipe's optimizer, and that of `FusedSGD`."""
        ordinary, fused = Arm("fp32", False), Arm("fp32", True)

        def top1(arm: Arm, rates: tuple[float, float]) -> float:
            try:
                return self.scores(arm, rates, _SEARCH_SEED, "validation")["top1"]
            except FloatingPointError:  # the rate is too large
                return -1.0

        rate = max(self.problem.rates, key=lambda lr: top1(ordinary, (lr, lr)))
        return rate, max(self.problem.fused_rates, key=lambda lr: top1(fused, (rate, lr)))

    def scores(self, arm: Arm, rates: tuple[float, float], seed: int, split: str) -> Scores:
        """Train with `rates` as returned by the method `rates`, and evaluate on `split`."""
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self._folder) as run:
            settings = {"run": run, "seed": seed, "data": {**self._data, "eval_split": split}}
            tree = {**self._recipe(arm, rates), **settings}
            log = (Path(run) / "log.txt").open("w")
            with log, redirect_stdout(log), redirect_stderr(log):
                register_networks()
                train(build_recipe(tree, origin="experiments.row_types"), self._world)
            (path,) = RunFolder(Path(run)).evaluations.glob("step-*.json")
            found = json.loads(path.read_text(encoding="utf-8"))
        scores = {measure: float(found[measure]) for measure in MEASURES}
        text = ", ".join(f"{name} {scores[measure]:.2%}" for measure, name in MEASURES.items())
        CONSOLE.print(
            f"{arm.dtype}, {arm.update(self.problem)}, lr {rates[arm.fused]:g}, seed {seed}, "
            f"{split}: {text} ({time.perf_counter() - began:.0f} s)"
        )
        return scores

    def _recipe(self, arm: Arm, rates: tuple[float, float]) -> dict[str, Any]:
        recipe = self.problem.recipe
        optimizer = {**recipe["optimizer"], "lr": rates[0]}
        if arm.fused:
            of_head = {"fused_sgd": "in_backward", "lr": rates[1]}
            optimizer["head"] = {**optimizer.get("head", {}), **of_head}
        return {
            **recipe,
            "head": {"dtype": arm.dtype},
            "optimizer": optimizer,
            "train": {**recipe["train"], "duration": {"steps": self.problem.steps}},
        }


def compare(
    name: str, trials: Trials, num_seeds: int, rates: tuple[float, float] | None = None
) -> list[str]:
    """Return the rows of the table for the dataset `name`; search for `rates` if not given."""
    rates = rates or trials.rates()
    seeds = range(_SEARCH_SEED + 1, _SEARCH_SEED + 1 + num_seeds)
    found = {arm: {seed: trials.scores(arm, rates, seed, "test") for seed in seeds} for arm in ARMS}
    rows = []
    for arm, runs in found.items():
        exact = found[Arm("fp32", arm.fused)]
        cells = [name, arm.dtype, arm.update(trials.problem), f"{rates[arm.fused]:g}"]
        for measure in MEASURES:
            mine = 100 * np.array([runs[seed][measure] for seed in seeds])
            change = mine - 100 * np.array([exact[seed][measure] for seed in seeds])
            error = _deviation(change) / len(change) ** 0.5
            cells.append(f"{mine.mean():.2f} ± {_deviation(mine):.2f}")
            cells.append("" if runs is exact else f"{change.mean():+.2f} ± {error:.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _deviation(numbers: np.ndarray) -> float:
    return float(numbers.std(ddof=1)) if len(numbers) > 1 else float("nan")


def header() -> list[str]:
    cells = ["data", "rows", "update of the rows", "lr"]
    for name in MEASURES.values():
        cells += [f"{name} %", "minus fp32"]
    return [f"| {' | '.join(cells)} |", f"|{' --- |' * len(cells)}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on the requested datasets, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.row_types",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data",
        nargs="*",
        default=["glyphs"],
        metavar="DATA",
        help="glyphs, cifar100=FILE or tweets=TABLE; default: glyphs",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--steps", type=int, help="number of training steps of each run")
    parser.add_argument(
        "--rates",
        type=float,
        nargs=2,
        metavar=("LR", "FUSED_LR"),
        help="learning rates; by default, they are searched for",
    )
    options = parser.parse_args(arguments)
    CONSOLE.print(machine())
    rows = header()
    for each in options.data:
        name, _, path = each.partition("=")
        if name not in PROBLEMS or bool(path) == (name == "glyphs"):
            parser.error(f"unknown DATA {each}: pass glyphs, cifar100=FILE or tweets=TABLE")
        problem = PROBLEMS[name](*([Path(path)] if path else []))
        problem = replace(problem, steps=options.steps or problem.steps)
        rates = tuple(options.rates) if options.rates else None
        with tempfile.TemporaryDirectory() as folder, open_world("cpu") as world:
            rows += compare(name, Trials(problem, Path(folder), world), options.seeds, rates)
    CONSOLE.print("\n".join(rows))


if __name__ == "__main__":
    main()

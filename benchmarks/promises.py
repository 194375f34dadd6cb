"""Check that thresholds keep their promises on held-out samples of three trained models.

    python -m benchmarks.promises --out DIR

For each data set, a small model is trained. Fresh samples of its classes, which are not in the
training split, are scored for their own class. In each of 200 re-splits, a random part of the
samples of each class sets the thresholds, and the others measure the pass rate:

- The number of the M others that pass a guaranteed threshold, the m-th lowest of n scores, has a
  beta-binomial distribution with the parameters n - m + 1 and m, whatever the distribution of the
  scores is. The share of the classes in which at least the recall's fraction of them pass is
  compared with the share that this distribution predicts.
- For shrunk and pooled thresholds, the table contains the share of the pass rates inside the
  interval, for classes with at least `LEAST_OTHERS` other samples, because pass rates measured on
  fewer samples are too noisy.

Takes about 15 minutes on 2 cores. Files in DIR are reused.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from data.loading.loader import EvalLoader
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames, Glyphs
from data.sources.source import CommandSource
from data.text.tokenizer_training import train_tokenizer
from trainer.promises import KINDS, Promises, groups_of_head, make_promises
from trainer.promises.bounds import guaranteed_rank
from trainer.recipe import load_recipe
from trainer.run.trained_run import open_trained
from trainer.train import train
from trainer.world import World, open_world

RECALLS, CONFIDENCE = (0.8, 0.9), 0.9
NUM_SPLITS, LEAST_OTHERS = 200, 40
_RECIPES = Path(__file__).parents[1] / "launch" / "recipes"

_HELD_OUT = ("de", "es", "fa", "fr", "it", "pt", "ru")


@dataclass(frozen=True)
class DataSet:
    """A model to train on `source`, and the split of `fresh` with new samples of its classes."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    source: CommandSource
    fresh: CommandSource
    split: str


DATA_SETS = (
    DataSet(
        "glyphs of make demo",
        "glyphs",
        ("head.loss.kind=batch_ce", "train.duration.epochs=1"),
        Glyphs(1000),
        Glyphs(1000, seed=1),
        "train",
    ),
    DataSet(
        "glyphs, 200 classes, V-tree",
        "glyphs",
        (
            "head.weights.kind=vtree",
            "data.image.size=24",
            "backbone.config.hidden_sizes=[16, 32, 64]",
            "backbone.config.depths=[1, 1, 1]",
        ),
        Glyphs(200, size=24),
        Glyphs(200, size=24, samples=6, seed=1),
        "train",
    ),
    DataSet(
        "emoji-names, 300 classes",
        "emoji-names",
        ("backbone.config.num_hidden_layers=1", "backbone.config.hidden_size=128"),
        EmojiNames(300, test_languages=_HELD_OUT),
        EmojiNames(300, test_languages=_HELD_OUT),
        "test",
    ),
)


@dataclass(frozen=True)
class Scores:
    """Scores [N] of samples for their own classes, `labels` [N], and groups of classes [K]."""

    scores: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


def scores_of(data: DataSet, folder: Path, world: World) -> Scores:
    """Train the model and score the fresh samples, or load the scores from an earlier call."""
    file = folder / "scores.npz"
    if not file.exists():
        run = _trained(data, folder, world)
        shards = folder / "fresh"
        if data.fresh == data.source:
            shards = folder / "shards"
        elif not shards.exists():
            write_shards(data.fresh, shards)
        found = _scored(run, shards, data.split, world)
        np.savez(file, scores=found.scores, labels=found.labels, groups=found.groups)
    with np.load(file) as arrays:
        return Scores(**arrays)


def _trained(data: DataSet, folder: Path, world: World) -> Path:
    shards, run = folder / "shards", folder / "run"
    if not shards.exists():
        write_shards(data.source, shards)
    settings = [*data.settings, f"data.shards={shards}", f"run={run}", "telemetry.log_every=200"]
    if data.recipe == "emoji-names":
        tokenizer = folder / "tokenizer"
        if not tokenizer.exists():
            train_tokenizer(shards, tokenizer, vocab_size=8000, threads=2)
        settings += [f"data.text.tokenizer={tokenizer}", "backbone.config.vocab_size=8000"]
    train(load_recipe(_RECIPES / f"{data.recipe}.yaml", settings), world)
    return run


def _scored(run: Path, shards: Path, name: str, world: World) -> Scores:
    trained = open_trained(run, world)
    task, head = trained.task.eval(), trained.task.head
    with open_split(shards, name) as split, torch.no_grad():
        assert [one.name for one in split.classes] == [one.name for one in trained.manifest.classes]
        loader = EvalLoader(split, trained.recipe.data, batch=512)
        features = torch.cat([task.features(batch.inputs) for batch in loader])
        labels = torch.from_numpy(split.labels.astype(np.int64))
    scores = torch.zeros(len(labels))
    for block in head.score_blocks(features, 64):
        own = torch.isin(labels, block.class_ids)
        at = torch.empty(head.num_classes, dtype=torch.int64)
        at[block.class_ids] = torch.arange(len(block.class_ids))
        scores[own] = block.scores[own, at[labels[own]]]
    return Scores(scores.numpy(), labels.numpy(), groups_of_head(head))


@dataclass
class Tally:
    """Counts of classes over all re-splits, of one kind and recall."""

    classes: int = 0
    reached: int = 0  # at least the recall's fraction of the others pass
    expected: float = 0.0  # of `reached`
    variance: float = 0.0  # of `reached`
    passes: float = 0.0
    estimates: float = 0.0
    measured: int = 0  # classes with enough others to measure the pass rate
    covered: int = 0
    widths: list[float] = field(default_factory=list)


def check(found: Scores, rng: np.random.Generator) -> dict[tuple[float, str], Tally]:
    """Tally all re-splits by recall and kind."""
    tallies: dict[tuple[float, str], Tally] = defaultdict(Tally)
    num = np.bincount(found.labels, minlength=len(found.groups))
    for _ in range(NUM_SPLITS):
        # Up to half of the samples of a class set its threshold.
        used = rng.integers(0, num // 2, endpoint=True)
        order = np.lexsort((rng.random(len(found.labels)), found.labels))
        labels = found.labels[order]
        position = np.arange(len(labels)) - (np.cumsum(num) - num)[labels]
        sets = position < used[labels]
        scores = found.scores[order]
        promises = make_promises(scores[sets], labels[sets], found.groups, RECALLS, CONFIDENCE)
        for column in range(len(RECALLS)):
            passes = scores[~sets] >= promises.thresholds[labels[~sets], column]
            passed = np.bincount(labels[~sets], passes, len(num)).astype(np.int64)
            _add(tallies, promises, column, passed, num - used)
    return tallies


def _add(
    tallies: dict[tuple[float, str], Tally],
    promises: Promises,
    column: int,
    passed: np.ndarray,
    others: np.ndarray,
) -> None:
    recall = promises.recalls[column]
    needed = np.ceil(recall * others - 1e-9)
    for number, kind in enumerate(KINDS):
        of_kind = (promises.kinds[:, column] == number) & (others > 0)
        if not of_kind.any():
            continue
        tally, k, M = tallies[recall, kind], passed[of_kind], others[of_kind]
        estimate, low, high = promises.pass_rates[of_kind, column].astype(np.float64).T
        tally.classes += len(k)
        tally.reached += int((k >= needed[of_kind]).sum())
        tally.passes += float((k / M).sum())
        tally.estimates += float(np.nansum(estimate))
        large = M >= LEAST_OTHERS
        rates = (k / M)[large]
        tally.measured += int(large.sum())
        tally.covered += int(((rates >= low[large]) & (rates <= high[large])).sum())
        tally.widths += (high - low).tolist()
        if kind == "guaranteed":
            n = promises.positives[of_kind].astype(np.int64)
            m = guaranteed_rank(n, recall, promises.confidence)
            share = stats.betabinom.sf(needed[of_kind] - 1, M, n - m + 1, m)
            tally.expected += float(share.sum())
            tally.variance += float((share * (1 - share)).sum())


HEADER = (
    "| data set | recall | kind | classes | reach the recall | beta-binomial | mean pass rate | "
    "estimate | interval width | inside |"
)


def rows(name: str, tallies: dict[tuple[float, str], Tally]) -> Iterator[str]:
    """Yield the rows of the Markdown table."""
    for (recall, kind), tally in sorted(tallies.items()):
        n, expected = tally.classes, "-"
        if kind == "guaranteed":
            error = 3 * np.sqrt(tally.variance) / n
            expected = f"{tally.expected / n:.4f} ± {error:.4f}"
        inside = f"{tally.covered / tally.measured:.3f}" if tally.measured else "-"
        yield (
            f"| {name} | {recall:g} | {kind} | {n / NUM_SPLITS:.0f} | {tally.reached / n:.4f} | "
            f"{expected} | {tally.passes / n:.3f} | {tally.estimates / n:.3f} | "
            f"{np.mean(tally.widths):.3f} | {inside} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for shards and runs")
    numbers = range(len(DATA_SETS))
    parser.add_argument(
        "numbers", nargs="*", type=int, choices=numbers, help="data sets to check; default: all"
    )
    options = parser.parse_args(arguments)
    print(HEADER, "|---" * 10 + "|", sep="\n")
    broken = []
    with open_world("cpu") as world:
        for number in options.numbers or numbers:
            data = DATA_SETS[number]
            found = scores_of(data, options.out / str(number), world)
            tallies = check(found, np.random.default_rng(number))
            print(*rows(data.name, tallies), sep="\n", flush=True)
            for (recall, kind), tally in tallies.items():
                if kind == "guaranteed" and (
                    tally.reached < tally.expected - 3 * np.sqrt(tally.variance)
                ):
                    broken.append(f"{data.name} at recall {recall:g}")
    if broken:
        raise SystemExit(f"fewer classes than predicted reach their recall: {', '.join(broken)}")


if __name__ == "__main__":
    main()

"""Check that thresholds keep their promises on held-out samples of a trained model.

    kway shard glyphs -o fresh --seed 1            # new samples of the classes of the run
    python -m benchmarks.promises runs/glyphs fresh --split train

Samples that are not in the training split are scored for their own class. In each of 200 re-splits,
a random part of the samples of each class sets the thresholds, and the rest measure the pass rate:

- The number of the M others that pass a guaranteed threshold, the m-th lowest of n scores, has a
  beta-binomial distribution with the parameters n - m + 1 and m, whatever the distribution of the
  scores is. The share of the classes in which at least the recall's fraction of them pass is
  compared with the share that this distribution predicts.
- For shrunk and pooled thresholds, the table contains the share of the pass rates inside the
  interval, for classes with at least `LEAST_OTHERS` other samples, because pass rates measured on
  fewer samples are too noisy.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from data.loading.loader import EvalLoader
from data.shards.split import open_split
from trainer.promises import KINDS, groups_of_head, make_promises
from trainer.promises.bounds import guaranteed_rank
from trainer.run.trained_run import open_trained
from trainer.world import World, open_world

RECALLS, CONFIDENCE = (0.8, 0.9), 0.9
NUM_SPLITS, LEAST_OTHERS = 200, 40


@dataclass(frozen=True)
class Scores:
    """Scores [N] of samples for their own classes, `labels` [N], and groups of classes [K]."""

    scores: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


def scores_of(run: Path, shards: Path, name: str, world: World) -> Scores:
    """Score the samples of a split with the newest checkpoint of a run."""
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


@dataclass(frozen=True)
class Checked:
    """The classes of all re-splits that have other samples, at one recall: arrays [n].

    kinds: positions in `KINDS`. positives: samples that set the threshold. others: the other
    samples, of which `passed` pass it. rates [n, 3]: the estimated pass rate and its interval.
    """

    recall: float
    kinds: np.ndarray
    positives: np.ndarray
    others: np.ndarray
    passed: np.ndarray
    rates: np.ndarray

    def of(self, kind: str) -> "Checked":
        chosen = self.kinds == KINDS.index(kind)
        arrays = (self.kinds, self.positives, self.others, self.passed, self.rates)
        return Checked(self.recall, *(array[chosen] for array in arrays))

    @property
    def reached(self) -> np.ndarray:
        """Whether at least the recall's fraction of the other samples pass."""
        return self.passed >= np.ceil(self.recall * self.others - 1e-9)

    def predicted(self, confidence: float) -> tuple[float, float]:
        """Return the share of classes that reach the recall, as predicted for guaranteed
        thresholds, and three times its standard error."""
        m = guaranteed_rank(self.positives, self.recall, confidence)
        needed = np.ceil(self.recall * self.others - 1e-9) - 1
        share = stats.betabinom.sf(needed, self.others, self.positives - m + 1, m)
        return float(share.mean()), 3 * float(np.sqrt((share * (1 - share)).sum())) / len(share)


def check(found: Scores, rng: np.random.Generator) -> list[Checked]:
    """Set and check the thresholds of all re-splits, for each recall."""
    classes: list[list[tuple[np.ndarray, ...]]] = [[] for _ in RECALLS]
    num = np.bincount(found.labels, minlength=len(found.groups))
    for _ in range(NUM_SPLITS):
        # Up to half of the samples of a class set its threshold.
        used = rng.integers(0, num // 2, endpoint=True)
        order = np.lexsort((rng.random(len(found.labels)), found.labels))
        labels, scores = found.labels[order], found.scores[order]
        position = np.arange(len(labels)) - (np.cumsum(num) - num)[labels]
        sets, others = position < used[labels], num - used
        promises = make_promises(scores[sets], labels[sets], found.groups, RECALLS, CONFIDENCE)
        for column, of_recall in enumerate(classes):
            passes = scores[~sets] >= promises.thresholds[labels[~sets], column]
            passed = np.bincount(labels[~sets], passes, len(num)).astype(np.int64)
            arrays = (promises.kinds[:, column], promises.positives.astype(np.int64), others)
            rates = promises.pass_rates[:, column].astype(np.float64)
            of_recall.append(tuple(each[others > 0] for each in (*arrays, passed, rates)))
    return [
        Checked(recall, *map(np.concatenate, zip(*of_recall, strict=True)))
        for recall, of_recall in zip(RECALLS, classes, strict=True)
    ]


HEADER = (
    "| dataset | recall | kind | classes | reach the recall | beta-binomial | mean pass rate | "
    "estimate | interval width | inside |"
)


def rows(name: str, all_checked: Sequence[Checked]) -> Iterator[str]:
    """Yield the rows of the Markdown table."""
    for checked, kind in product(all_checked, KINDS):
        found = checked.of(kind)
        if not len(found.kinds):
            continue
        predicted = "-"
        if kind == "guaranteed":
            predicted = "{:.4f} ± {:.4f}".format(*found.predicted(CONFIDENCE))
        rate, (estimate, low, high) = found.passed / found.others, found.rates.T
        large = found.others >= LEAST_OTHERS
        inside = ((rate >= low) & (rate <= high))[large]
        yield (
            f"| {name} | {found.recall:g} | {kind} | {len(rate) / NUM_SPLITS:.0f} | "
            f"{found.reached.mean():.4f} | {predicted} | {rate.mean():.3f} | "
            f"{np.nansum(estimate) / len(rate):.3f} | {(high - low).mean():.3f} | "
            f"{f'{inside.mean():.3f}' if len(inside) else '-'} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument("shards", type=Path, help="shards with other samples of its classes")
    parser.add_argument("--split", default="test", help="split of the shards")
    options = parser.parse_args(arguments)
    with open_world("cpu") as world:
        found = scores_of(options.run, options.shards, options.split, world)
    checked = check(found, np.random.default_rng(0))
    print(HEADER, "|---" * 10 + "|", *rows(options.run.name, checked), sep="\n")
    for each in checked:
        guaranteed = each.of("guaranteed")
        if len(guaranteed.kinds):
            share, error = guaranteed.predicted(CONFIDENCE)
            if guaranteed.reached.mean() < share - error:
                raise SystemExit(f"fewer classes than predicted reach recall {each.recall:g}")


if __name__ == "__main__":
    main()

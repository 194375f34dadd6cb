"""Check that thresholds keep their promises on held-out samples of a trained model.

    kway shard glyphs -o fresh --seed 1            # new samples of the classes of the run
    python -m benchmarks.promises runs/glyphs fresh --split train

Samples that are not in the training split are scored for their own class. In each of 200 re-splits,
a random part of the samples of each class sets the thresholds, and the rest measure the pass rate.
The number of the M others that pass a guaranteed threshold, the m-th lowest of n scores, has a
beta-binomial distribution with the parameters n - m + 1 and m, whatever the distribution of the
scores is. The share of the classes in which at least the recall's fraction of them pass is compared
with the share that this distribution predicts; the exit code is 1 if it is lower.
"""

import argparse
import sys
from collections.abc import Sequence
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
NUM_SPLITS = 200
HEADER = (
    "| recall | kind | classes | reach the recall | beta-binomial | mean pass rate | estimate |",
    "|---" * 7 + "|",
)


def scores_of(
    run: Path, shards: Path, name: str, world: World
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores [N] of the samples of a split for their own classes, with the newest
    checkpoint of a run, their labels [N] and the groups of the classes [K]."""
    trained = open_trained(run, world)
    task, head = trained.task.eval(), trained.task.head
    with open_split(shards, name) as split, torch.no_grad():
        assert [one.name for one in split.classes] == [
            one.name for one in trained.data.manifest.classes
        ]
        loader = EvalLoader(split, trained.recipe.data, batch=512)
        features = torch.cat([task.features(batch.inputs) for batch in loader])
        labels = torch.from_numpy(split.labels.astype(np.int64))
    scores = torch.zeros(len(labels))
    for block in head.score_blocks(features, 64):
        own = torch.isin(labels, block.class_ids)
        at = torch.empty(head.num_classes, dtype=torch.int64)
        at[block.class_ids] = torch.arange(len(block.class_ids))
        scores[own] = block.scores[own, at[labels[own]]]
    return scores.numpy(), labels.numpy(), groups_of_head(head)


def resplits(
    scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Set and check the thresholds of all re-splits. Returns a row for each class that has other
    samples, of each re-split and recall: the recall, the kind, the number of samples that set the
    threshold, of other samples and of those that pass, and the estimated pass rate."""
    found, num = [], np.bincount(labels, minlength=len(groups))
    for _ in range(NUM_SPLITS):
        # Up to half of the samples of a class set its threshold.
        used = rng.integers(0, num // 2, endpoint=True)
        order = np.lexsort((rng.random(len(labels)), labels))
        of_class, ordered = labels[order], scores[order]
        position = np.arange(len(labels)) - (np.cumsum(num) - num)[of_class]
        sets, others = position < used[of_class], num - used
        promises = make_promises(ordered[sets], of_class[sets], groups, RECALLS, CONFIDENCE)
        promises = promises.by_class()
        for column, recall in enumerate(RECALLS):
            passes = ordered[~sets] >= promises.thresholds[of_class[~sets], column]
            passed = np.bincount(of_class[~sets], passes, len(num))
            kinds, rates = promises.kinds[:, column], promises.pass_rates[:, column, 0]
            of_recall = np.full(len(num), recall), kinds, promises.positives, others, passed, rates
            found.append(np.stack(of_recall, 1)[others > 0])
    return np.concatenate(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument("shards", type=Path, help="shards with other samples of its classes")
    parser.add_argument("--split", default="test", help="split of the shards")
    options = parser.parse_args(arguments)
    with open_world("cpu") as world:
        found = scores_of(options.run, options.shards, options.split, world)
    table, broken = resplits(*found, np.random.default_rng(0)), False
    print(*HEADER, sep="\n")
    for recall, (number, kind) in product(RECALLS, enumerate(KINDS)):
        rows = table[(table[:, 0] == recall) & (table[:, 1] == number)]
        if not len(rows):
            continue
        _, _, positives, others, passed, estimate = rows.T
        needed, predicted = np.ceil(recall * others - 1e-9), "-"
        reached = (passed >= needed).mean()
        if kind == "guaranteed":
            m = guaranteed_rank(positives.astype(np.int64), recall, CONFIDENCE)
            share = stats.betabinom.sf(needed - 1, others, positives - m + 1, m)
            error = 3 * float(np.sqrt((share * (1 - share)).sum())) / len(share)
            predicted = f"{share.mean():.4f} ± {error:.4f}"
            broken |= bool(reached < share.mean() - error)
        print(
            f"| {recall:g} | {kind} | {len(rows) / NUM_SPLITS:.0f} | {reached:.4f} | {predicted} | "
            f"{(passed / others).mean():.3f} | {np.nansum(estimate) / len(rows):.3f} |"
        )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

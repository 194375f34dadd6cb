"""Metrics of single-logit classification (SLC) with very many classes: time, peak memory, and
agreement with scikit-learn.

As in an evaluation, the scores of all samples are computed for one block of classes at a time;
there is never a samples x classes tensor. Class frequencies are long-tailed. Some of the classes
that have samples are also measured with scikit-learn, which is not timed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from sklearn.metrics import average_precision_score, precision_recall_curve
from torch import Tensor

from benchmarks.peak_memory import resident, restart_high_water_mark
from benchmarks.timing import Row
from heads import ClassHead
from heads.losses import CrossEntropy
from heads.slc import ClassMeasures, block_measures

_RECALLS = (0.9, 0.99)


CLASSES, SAMPLES, DIM = 100_000, 50_000, 64
_CHECKED = 200  # number of classes that scikit-learn measures


def rows() -> Iterator[Row]:
    """Measure all classes once."""
    head, features, labels = problem(CLASSES, SAMPLES, DIM)
    found = run(head, features, labels, sampled_classes(labels, _CHECKED))
    assert sum(len(block.class_ids) for block in found.blocks) == CLASSES
    total = found.scoring_seconds + found.measuring_seconds
    off = ", ".join(f"{name} {value:.0e}" for name, value in found.differences.items())
    yield Row(
        "SLC measures of all classes",
        f"{CLASSES:,} classes x {SAMPLES:,} samples, d = {DIM}",
        f"{total:.0f} s, {found.peak_bytes / 1e6:,.0f} MB",
        "no N x K tensor",
        f"{found.scoring_seconds:.0f} s for the scores; a tensor of all scores would take "
        f"{4 * CLASSES * SAMPLES / 1e6:,.0f} MB; largest difference from scikit-learn: {off}",
    )


@dataclass
class Run:
    """Results of a pass over all classes. `differences`: the largest difference from scikit-learn
    for each metric."""

    classes_at_once: int
    scoring_seconds: float = 0.0
    measuring_seconds: float = 0.0
    peak_bytes: int = 0
    blocks: list[ClassMeasures] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)

    def agree(self, name: str, got: float, expected: float) -> None:
        """Update the largest difference found so far for a metric."""
        self.differences[name] = max(self.differences.get(name, 0.0), abs(got - expected))


def problem(classes: int, samples: int, dim: int) -> tuple[ClassHead, Tensor, Tensor]:
    """Return a head, features [N, d] near the rows of their classes, and long-tailed labels [N]."""
    head = ClassHead(dim, classes, CrossEntropy(), bias=False, init_std=1.0)
    labels = (classes * torch.rand(samples, dtype=torch.float64) ** 3).long()
    features = head.weight.detach()[labels] + 2 * torch.randn(samples, dim)
    return head, features, labels


def sampled_classes(labels: Tensor, num: int) -> set[int]:
    """Return up to `num` random classes that have samples, and the most frequent class."""
    present, counts = labels.unique(return_counts=True)
    some = present[torch.randperm(len(present))[:num]].tolist()
    return {int(present[counts.argmax()]), *some}


def run(head: ClassHead, features: Tensor, labels: Tensor, checked: set[int]) -> Run:
    """Measure every class, block by block."""
    found = Run(classes_at_once=max(1, head.engine.logit_bytes // (3 * 4 * len(labels))))
    before = restart_high_water_mark()
    scores = head.score_blocks(features, found.classes_at_once)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("classes", total=head.num_classes)
        while True:
            began = time.perf_counter()
            block = next(scores, None)
            scored = time.perf_counter()
            if block is None:
                break
            measures = block_measures(block.scores, labels, block.class_ids, _RECALLS)
            found.scoring_seconds += scored - began
            found.measuring_seconds += time.perf_counter() - scored
            found.blocks.append(measures)
            compare(found, measures, block.scores, labels, checked)
            progress.advance(bar, len(block.class_ids))
    found.peak_bytes = resident("VmHWM") - before
    return found


def compare(
    found: Run, measures: ClassMeasures, scores: Tensor, labels: Tensor, checked: set[int]
) -> None:
    """Compare the measures of the `checked` classes of a block with those of scikit-learn."""
    for column, class_id in enumerate(measures.class_ids.tolist()):
        if class_id not in checked:
            continue
        true, values = (labels == class_id).numpy(), scores[:, column].numpy()
        expected = average_precision_score(true, values)
        found.agree("average precision", float(measures.average_precision[column]), expected)
        precision, recall, thresholds = precision_recall_curve(true, values)
        for r, wanted in enumerate(measures.recalls):
            index = np.flatnonzero(recall[:-1] >= wanted * (1 - 1e-12))[-1]
            at = float(measures.precision_at[column, r]), float(measures.threshold[column, r])
            found.agree("precision at recall", at[0], float(precision[index]))
            found.agree("threshold", at[1], float(thresholds[index]))

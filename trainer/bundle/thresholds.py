"""The thresholds of a bundle's classes, and the rule that selects the threshold of a query.

The threshold of a class at recall r is the score that a fraction r of its validation samples
reaches: with 10 samples and a recall of 0.9, it is the 9th highest score. With few samples, this
estimate is too noisy to reach the recall on new data (`least_positives`). Such a class uses the
pooled threshold, which is computed in the same way from the samples of all classes, each scored for
its own class.

thresholds.safetensors   `positives` int32 [K]: validation samples of each class;
                         `thresholds` float32 [K, recalls]: NaN for a class without positives;
                         `reached` int32 [K, recalls, 2]: how many validation samples of the
                         class, and of any class, score at or above the threshold that the
                         class uses (absent in bundles of format 2)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import save_file

from trainer.bundle.mapped_arrays import mapped_arrays
from trainer.bundle.spec import THRESHOLDS, RecallSpec

ThresholdSource = Literal["class", "pooled"]


def least_positives(recall: float) -> int:
    """Return the minimum number of positives for which a class's own threshold can reach `recall`.

    On average, only n / (n + 1) of new positives score at or above the lowest of n scores. A recall
    of 0.9 therefore requires 9 positives, and a recall of 0.99 requires 99. No number is sufficient
    for a recall of 1, which is treated as 0.999.
    """
    recall = min(recall, 0.999)
    return math.ceil(recall / (1 - recall) * (1 - 1e-12))  # 0.9 / (1 - 0.9) is above 9


@dataclass(frozen=True)
class Threshold:
    """The threshold of a class at a recall, with its validation counts. None means that a value is
    unknown.

    It was computed from `samples` validation samples: those of the class or, for a pooled
    threshold, those of all classes. Of the class's `class_samples` samples, `class_reached` reach
    the threshold; `all_reached` counts the samples of any class that do. `expected_precision` is
    the fraction of these `all_reached` samples that belong to the class or, for a pooled threshold,
    the mean of this fraction over all classes with samples.
    """

    score: float | None
    source: ThresholdSource | None
    expected_precision: float | None
    samples: int | None
    class_samples: int
    class_reached: int | None
    all_reached: int | None


@dataclass(frozen=True)
class ClassThresholds:
    """The thresholds of all classes: `positives` int32 [K], `thresholds` float32 [K, R] in the
    order of the R `recalls`, and `reached` int32 [K, R, 2], which is None for bundles of format 2.
    """

    recalls: Sequence[RecallSpec]
    positives: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    reached: NDArray[np.int32] | None = None

    @classmethod
    def open(
        cls, folder: Path, recalls: Sequence[RecallSpec], num_classes: int
    ) -> "ClassThresholds":
        """Open the file written by `write`. Raises ValueError if the shapes of its arrays do not
        match.
        """
        arrays: dict[str, Any] = mapped_arrays(
            folder / THRESHOLDS,
            {
                "positives": (np.int32, (num_classes,)),
                "thresholds": (np.float32, (num_classes, len(recalls))),
            },
            optional={"reached": (np.int32, (num_classes, len(recalls), 2))},
        )
        return cls(recalls, **arrays)

    def write(self, folder: Path, num_classes: int) -> None:
        """Write the file into `folder`. Raises ValueError if shapes do not match `num_classes`."""
        shape = (num_classes, len(self.recalls))
        if self.positives.shape != shape[:1] or self.thresholds.shape != shape:
            raise ValueError(
                f"thresholds have shape {list(self.thresholds.shape)} and positives "
                f"{list(self.positives.shape)}, which do not match {num_classes} classes and "
                f"{len(self.recalls)} recalls"
            )
        arrays = {"positives": self.positives, "thresholds": self.thresholds}
        if self.reached is not None:
            assert self.reached.shape == (*shape, 2)
            arrays["reached"] = self.reached
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            folder / THRESHOLDS,
        )

    def of(self, class_id: int, recall: float) -> Threshold:
        """Return the threshold of a class at `recall`.

        A class with too few positives uses the pooled threshold. If there is no pooled threshold,
        score and source are None. Raises ValueError for a recall without thresholds.
        """
        column = self._column(recall)
        entry, positives = self.recalls[column], int(self.positives[class_id])
        own = float(self.thresholds[class_id, column])
        of_class = of_any = None
        if self.reached is not None:
            of_class, of_any = self.reached[class_id, column].tolist()
        if takes_own(positives, own, entry.min_positives):
            precision = of_class / of_any if of_class is not None and of_any else None
            return Threshold(own, "class", precision, positives, positives, of_class, of_any)
        return Threshold(
            entry.pooled,
            None if entry.pooled is None else "pooled",
            entry.pooled_precision,
            entry.pooled_samples,
            positives,
            of_class,
            of_any,
        )

    def _column(self, recall: float) -> int:
        for column, entry in enumerate(self.recalls):
            if abs(entry.recall - recall) < 1e-9:
                return column
        known = ", ".join(f"{entry.recall:g}" for entry in self.recalls) or "none"
        raise ValueError(
            f"this bundle contains no thresholds for recall {recall:g}, only for: {known}. Pass "
            "one of these or a threshold, or add recalls with `kway export --recall`"
        )


def takes_own(positives: ArrayLike, thresholds: ArrayLike, min_positives: ArrayLike) -> Any:
    """Return whether a class uses its own threshold instead of the pooled one. Accepts arrays."""
    return np.greater_equal(positives, min_positives) & np.isfinite(thresholds)

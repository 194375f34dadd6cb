"""The thresholds of a bundle's classes, and which of them a question is answered by.

thresholds.safetensors   `positives` int32 [K]: validation samples behind each class;
                         `thresholds` float32 [K, recalls]: NaN where a class has no positives
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trainer.bundle_spec import RecallSpec
from trainer.mapped_file import mapped_arrays

FILE = "thresholds.safetensors"
ThresholdSource = Literal["class", "pooled"]


def least_positives(recall: float) -> int:
    """Positives below which a class's own threshold cannot be trusted to reach `recall`.

    Even the lowest of n scores is reached, on average, by only n / (n + 1) of new ones: 9 are
    needed for a recall of 0.9, 99 for 0.99. For 1 no number is enough: it counts as 0.999.
    """
    recall = min(recall, 0.999)
    return math.ceil(recall / (1 - recall) * (1 - 1e-12))  # 0.9 / 0.1 comes out above 9


@dataclass(frozen=True)
class ClassThresholds:
    """`positives` int32 [K], and `thresholds` float32 [K, R] in the order of the R `recalls`."""

    recalls: Sequence[RecallSpec]
    positives: NDArray[np.int32]
    thresholds: NDArray[np.float32]

    @classmethod
    def open(
        cls, folder: Path, recalls: Sequence[RecallSpec], num_classes: int
    ) -> "ClassThresholds":
        """Open what `write` wrote; ValueError where it does not fit."""
        arrays: dict[str, Any] = mapped_arrays(
            folder / FILE,
            {
                "positives": (np.int32, (num_classes,)),
                "thresholds": (np.float32, (num_classes, len(recalls))),
            },
        )
        return cls(recalls, arrays["positives"], arrays["thresholds"])

    def write(self, folder: Path, num_classes: int) -> None:
        """Write them into `folder`; ValueError where there are not that many."""
        shape = (num_classes, len(self.recalls))
        if self.positives.shape != shape[:1] or self.thresholds.shape != shape:
            raise ValueError(
                f"thresholds of shape {list(self.thresholds.shape)} and positives of "
                f"{list(self.positives.shape)}: {num_classes} classes and {len(self.recalls)} "
                "recalls need others"
            )
        arrays = {
            "positives": np.ascontiguousarray(self.positives, np.int32),
            "thresholds": np.ascontiguousarray(self.thresholds, np.float32),
        }
        save_file(arrays, folder / FILE)

    def of(self, class_id: int, recall: float) -> tuple[float | None, ThresholdSource | None]:
        """The score that reaches `recall`, and whose it is: the class's own or the pooled one.

        A class of too few positives takes the pooled one; (None, None) where there is none either.
        Raises ValueError for a recall that there are no thresholds for.
        """
        for column, entry in enumerate(self.recalls):
            if abs(entry.recall - recall) < 1e-9:
                own = float(self.thresholds[class_id, column])
                if self.positives[class_id] >= entry.min_positives and math.isfinite(own):
                    return own, "class"
                return entry.pooled, None if entry.pooled is None else "pooled"
        known = ", ".join(f"{entry.recall:g}" for entry in self.recalls) or "none"
        raise ValueError(
            f"no thresholds for recall {recall:g}; this bundle holds: {known}. Give one of these, "
            "or a threshold; kway export --recall adds others"
        )

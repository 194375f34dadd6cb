"""The thresholds of a bundle's classes, with what each of them promises (`trainer/promises/`).

thresholds.safetensors   `positives` int32 [K]: validation samples of each class;
                         `thresholds` float32 [K, recalls]: NaN for a class without a threshold;
                         `kinds` uint8 [K, recalls]: indices into `trainer.promises.KINDS`;
                         `pass_rates` float32 [K, recalls, 3]: fraction of new samples of the class
                         that pass, an estimate and its interval;
                         `reached` int32 [K, recalls, 2]: how many validation samples of the class,
                         and of any class, score at or above the threshold

Bundles of formats 2 to 4 contain neither `kinds` nor `pass_rates`, and format 2 does not contain
`reached`. Their thresholds carry no guarantee. If a class has at least `min_positives` samples,
`thresholds` is the score that the recall's fraction of its own validation samples reach
(`empirical`). Otherwise, the class uses the pooled threshold of bundle.json.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trainer.bundle.mapped_arrays import mapped_arrays
from trainer.bundle.spec import THRESHOLDS, RecallSpec
from trainer.promises import KINDS, Promises, least_positives, wilson_interval

ThresholdKind = Literal["guaranteed", "shrunk", "pooled", "empirical"]
_DEFAULT_CONFIDENCE = 0.9  # of the precision intervals of bundles in an older format


@dataclass(frozen=True)
class Share:
    """A fraction and its interval. The estimate is None if only the interval is known."""

    estimate: float | None
    low: float
    high: float


@dataclass(frozen=True)
class Threshold:
    """The threshold of a class at a recall. None means that a value is unknown.

    `pass_rate` is the fraction of new samples of the class that pass, and `precision` the fraction
    of passing samples that belong to the class, if classes are as frequent as in the validation
    set. The intervals hold with `confidence`. Of the class's `class_samples` validation samples,
    `class_reached` reach the threshold; `all_reached` counts the samples of any class that do. For
    a pooled threshold, `below_pooled` is the fraction of the classes in which fewer validation
    samples than the recall reach it.
    """

    score: float | None
    kind: ThresholdKind | None
    confidence: float | None
    pass_rate: Share | None
    precision: Share | None
    class_samples: int
    class_reached: int | None
    all_reached: int | None
    below_pooled: float | None = None


@dataclass(frozen=True)
class ClassThresholds:
    """The thresholds of all classes at the R `recalls`, as in the file. `kinds` and `pass_rates`
    are None for bundles of formats 2 to 4, and `reached` is None for bundles of format 2.
    """

    recalls: Sequence[RecallSpec]
    positives: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    reached: NDArray[np.int32] | None = None
    kinds: NDArray[np.uint8] | None = None
    pass_rates: NDArray[np.float32] | None = None

    @classmethod
    def of_promises(
        cls, promises: Promises, reached: NDArray[np.integer], num_samples: int
    ) -> "ClassThresholds":
        """Return the thresholds of `promises` from `num_samples` samples. `reached` [K, R, 2]
        counts the samples at or above each threshold: those of the class, and those of any class.
        """
        promises = promises.by_class()
        recalls = tuple(
            RecallSpec(
                recall=recall,
                confidence=promises.confidence,
                pooled=pooled,
                pooled_samples=num_samples,
                below_pooled=below,
                min_positives=least_positives(recall, promises.confidence),
            )
            for recall, pooled, below in zip(
                promises.recalls,
                promises.pooled.tolist(),
                promises.below_pooled.tolist(),
                strict=True,
            )
        )
        return cls(
            recalls,
            promises.positives,
            promises.thresholds,
            reached.astype(np.int32),
            promises.kinds,
            promises.pass_rates,
        )

    @classmethod
    def open(
        cls, folder: Path, recalls: Sequence[RecallSpec], num_classes: int
    ) -> "ClassThresholds":
        """Open the file written by `write`. Raises ValueError if the shapes of its arrays do not
        match.
        """
        shape = (num_classes, len(recalls))
        expected: dict[str, Any] = {
            "positives": (np.int32, (num_classes,)),
            "thresholds": (np.float32, shape),
        }
        if any(entry.confidence is not None for entry in recalls):  # since format 5
            expected |= {"kinds": (np.uint8, shape), "pass_rates": (np.float32, (*shape, 3))}
        arrays: dict[str, Any] = mapped_arrays(
            folder / THRESHOLDS,
            expected,
            optional={"reached": (np.int32, (*shape, 2))},
        )
        return cls(recalls, **arrays)

    def write(self, folder: Path, num_classes: int) -> None:
        """Write the file into `folder`."""
        shape = (num_classes, len(self.recalls))
        arrays = {
            name: array
            for name in ("positives", "thresholds", "reached", "kinds", "pass_rates")
            if (array := getattr(self, name)) is not None
        }
        assert all(array.shape[:2] in (shape[:1], shape) for array in arrays.values())
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            folder / THRESHOLDS,
        )

    def of(self, class_id: int, recall: float) -> Threshold:
        """Return the threshold of a class at `recall`.

        Score and kind are None if there is no threshold. Raises ValueError for a recall without
        thresholds.
        """
        column = self._column(recall)
        entry = self.recalls[column]
        score, kind = self._decided(class_id, column)
        of_class = of_any = pass_rate = None
        if self.reached is not None:
            of_class, of_any = self.reached[class_id, column].tolist()
        if self.pass_rates is not None and score is not None:
            estimate, low, high = self.pass_rates[class_id, column].tolist()
            pass_rate = Share(None if math.isnan(estimate) else estimate, low, high)
        positives = int(self.positives[class_id])
        confidence = entry.confidence or _DEFAULT_CONFIDENCE
        return Threshold(
            score,
            kind,
            confidence,
            pass_rate,
            None if score is None else _precision(positives, of_class, of_any, confidence),
            positives,
            of_class,
            of_any,
            entry.below_pooled if kind == "pooled" else None,
        )

    def num_of_kind(self, column: int) -> dict[str, int]:
        """Return how many classes have a threshold of each kind at the recall `column`."""
        if self.kinds is None:
            return {}
        counts = np.bincount(self.kinds[:, column], minlength=len(KINDS)).tolist()
        return dict(zip(KINDS, counts, strict=True))

    def _decided(self, class_id: int, column: int) -> tuple[float | None, ThresholdKind | None]:
        own, entry = float(self.thresholds[class_id, column]), self.recalls[column]
        if self.kinds is not None:
            is_known = math.isfinite(own)
            return (own, KINDS[int(self.kinds[class_id, column])]) if is_known else (None, None)
        least = entry.min_positives
        if math.isfinite(own) and least is not None and self.positives[class_id] >= least:
            return own, "empirical"
        return entry.pooled, None if entry.pooled is None else "pooled"

    def _column(self, recall: float) -> int:
        for column, entry in enumerate(self.recalls):
            if abs(entry.recall - recall) < 1e-9:
                return column
        known = ", ".join(f"{entry.recall:g}" for entry in self.recalls) or "none"
        raise ValueError(
            f"this bundle contains no thresholds for recall {recall:g}, only for: {known}. Pass "
            "one of these or a threshold, or compute others with `kway calibrate --recall`"
        )


def _precision(
    positives: int, of_class: int | None, of_any: int | None, confidence: float
) -> Share | None:
    """Return the precision, which is unknown without validation samples of the class, and if no
    sample reaches the threshold.
    """
    if not positives or of_class is None or not of_any:
        return None
    return Share(of_class / of_any, *wilson_interval(of_class, of_any, confidence))

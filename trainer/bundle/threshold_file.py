"""The thresholds of a bundle's classes, with what each of them promises (`trainer/promises/`).

thresholds.safetensors   `positives` int32 [K]: validation samples of each class;
                         `thresholds` float32 [K, recalls]: NaN for a class without a threshold;
                         `kinds` uint8 [K, recalls]: indices into `trainer.promises.KINDS`;
                         `pass_rates` float32 [K, recalls, 3]: fraction of new samples of the class
                         that pass, an estimate and its interval;
                         `reached` int32 [K, recalls, 2]: how many validation samples of the class,
                         and of any class, score at or above the threshold

Bundles of formats 2 to 4 contain neither `kinds` nor `pass_rates`, and format 2 does not contain
`reached`. `_upgraded` adds them, so only this module knows the old formats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trainer.bundle.spec import THRESHOLDS, RecallSpec
from trainer.promises import KINDS, Promises, least_positives, wilson_interval

ThresholdKind = Literal["guaranteed", "shrunk", "pooled", "empirical"]
_KINDS: tuple[ThresholdKind, ...] = (*KINDS, "empirical")  # only bundles in an older format
_DEFAULT_CONFIDENCE = 0.9  # of the precision intervals of these bundles
_ARRAYS = ("positives", "thresholds", "reached", "kinds", "pass_rates")


@dataclass(frozen=True)
class Threshold:
    """The threshold of a class at a recall, with the field names of `ClassThreshold` in answers.
    None means that a value is unknown.

    `pass_rate` is the fraction of new samples of the class that pass, and `expected_precision` the
    fraction of passing samples that belong to the class, if classes are as frequent as in the
    validation set. The intervals hold with `confidence`. Of the class's `class_samples` validation
    samples, `class_reached` reach the threshold; `all_reached` counts the samples of any class that
    do. For a pooled threshold, `classes_below_recall` is the fraction of the classes in which fewer
    validation samples than the recall reach it.
    """

    threshold: float | None
    threshold_source: ThresholdKind | None
    confidence: float | None
    pass_rate: float | None
    pass_rate_interval: tuple[float, float] | None
    expected_precision: float | None
    expected_precision_interval: tuple[float, float] | None
    classes_below_recall: float | None
    class_samples: int
    class_reached: int | None
    all_reached: int | None


@dataclass(frozen=True)
class ClassThresholds:
    """The thresholds of all classes at the R `recalls`, as in the file. `reached` is None for
    bundles of format 2.
    """

    recalls: Sequence[RecallSpec]
    positives: NDArray[np.int32]
    thresholds: NDArray[np.floating]
    reached: NDArray[np.int32] | None
    kinds: NDArray[np.uint8]
    pass_rates: NDArray[np.float32]

    @classmethod
    def of_promises(cls, promises: Promises, reached: NDArray[np.integer]) -> "ClassThresholds":
        """Return the thresholds of `promises`. `reached` [K, R, 2] counts the samples at or above
        each threshold: those of the class, and those of any class.
        """
        promises = promises.by_class()
        recalls = tuple(
            RecallSpec(
                recall=recall,
                confidence=promises.confidence,
                pooled=pooled,
                pooled_samples=int(promises.positives.sum()),
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
        """Map the arrays of the file written by `write` into memory; replicas on one machine share
        the pages. Raises ValueError if the file is damaged or its arrays do not match bundle.json.
        """
        path, shape = folder / THRESHOLDS, (num_classes, len(recalls))
        expected = {
            "positives": (np.int32, (num_classes,)),
            "thresholds": (np.float32, shape),
            "kinds": (np.uint8, shape),
            "pass_rates": (np.float32, (*shape, 3)),
            "reached": (np.int32, (*shape, 2)),
        }
        is_old = all(entry.confidence is None for entry in recalls)  # before format 5
        optional = {"kinds", "pass_rates", "reached"} if is_old else {"reached"}
        try:
            # The torch loader maps the file without a copy; the numpy loader copies it.
            with safe_open(path, framework="pt") as file:
                arrays: dict[str, Any] = {
                    name: file.get_tensor(name).numpy()
                    for name in file.keys()  # noqa: SIM118
                }
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): copy the bundle again") from error
        found = {name: (array.dtype.type, array.shape) for name, array in arrays.items()}
        if not (found.items() <= expected.items() and expected.keys() - optional <= found.keys()):
            shapes = ", ".join(f"{name} {list(one)}" for name, (_, one) in sorted(found.items()))
            raise ValueError(
                f"{path} does not match bundle.json: it contains {shapes}; copy the bundle again"
            )
        for array in arrays.values():
            array.setflags(write=False)
        arrays = {"reached": None, **arrays}
        return cls(recalls, **(arrays if "kinds" in arrays else _upgraded(arrays, recalls)))

    def write(self, folder: Path, num_classes: int) -> None:
        """Write the file into `folder`."""
        shape = (num_classes, len(self.recalls))
        arrays = {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}
        assert all(array.shape[:2] in (shape[:1], shape) for array in arrays.values())
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            folder / THRESHOLDS,
        )

    def of(self, class_id: int, recall: float) -> Threshold:
        """Return the threshold of a class at `recall`.

        `threshold` and `threshold_source` are None if there is no threshold. Raises ValueError for
        a recall without thresholds.
        """
        column = self._column(recall)
        entry = self.recalls[column]
        threshold = source = pass_rate = pass_rate_interval = None
        if math.isfinite(own := float(self.thresholds[class_id, column])):
            threshold, source = own, _KINDS[int(self.kinds[class_id, column])]
            estimate, low, high = self.pass_rates[class_id, column].tolist()
            pass_rate = None if math.isnan(estimate) else estimate
            pass_rate_interval = None if math.isnan(low) else (low, high)
        positives = int(self.positives[class_id])
        confidence = entry.confidence or _DEFAULT_CONFIDENCE
        class_reached = all_reached = precision = precision_interval = None
        if self.reached is not None:
            class_reached, all_reached = self.reached[class_id, column].tolist()
            # Without samples of the class, or if no sample passes, the precision is unknown.
            if threshold is not None and positives and all_reached:
                precision = class_reached / all_reached
                precision_interval = wilson_interval(class_reached, all_reached, confidence)
        return Threshold(
            threshold=threshold,
            threshold_source=source,
            confidence=confidence,
            pass_rate=pass_rate,
            pass_rate_interval=pass_rate_interval,
            expected_precision=precision,
            expected_precision_interval=precision_interval,
            classes_below_recall=entry.below_pooled if source == "pooled" else None,
            class_samples=positives,
            class_reached=class_reached,
            all_reached=all_reached,
        )

    def num_of_kind(self, column: int) -> dict[str, int]:
        """Return how many classes have a threshold of each kind at the recall `column`."""
        return {
            kind: int((self.kinds[:, column] == number).sum()) for number, kind in enumerate(KINDS)
        }

    def _column(self, recall: float) -> int:
        for column, entry in enumerate(self.recalls):
            if abs(entry.recall - recall) < 1e-9:
                return column
        known = ", ".join(f"{entry.recall:g}" for entry in self.recalls) or "none"
        raise ValueError(
            f"this bundle contains no thresholds for recall {recall:g}, only for: {known}. Pass "
            "one of these or a threshold, or compute others with `kway calibrate --recall`"
        )


def _upgraded(arrays: dict[str, Any], recalls: Sequence[RecallSpec]) -> dict[str, Any]:
    """Return the arrays of formats 2 to 4 in the current form.

    Their thresholds promise nothing. If a class has at least `min_positives` samples, its threshold
    is the score that the recall's fraction of these samples reach (`empirical`). Otherwise, it is
    the pooled threshold of bundle.json.
    """
    own, positives = arrays["thresholds"], arrays["positives"][:, None]
    pooled = np.array([math.nan if e.pooled is None else e.pooled for e in recalls])
    least = np.array([e.min_positives or math.inf for e in recalls])
    is_own = np.isfinite(own) & (positives >= least)
    empirical_kind, pooled_kind = map(np.uint8, map(_KINDS.index, ("empirical", "pooled")))
    return {
        **arrays,
        "thresholds": np.where(is_own, own, pooled),
        "kinds": np.where(is_own, empirical_kind, pooled_kind),
        "pass_rates": np.broadcast_to(np.float32(math.nan), (*own.shape, 3)),
    }

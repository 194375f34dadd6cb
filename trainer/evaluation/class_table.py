"""The per-class results of an evaluation as rows and as CSV."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.files import temporary_path
from trainer.evaluation.measure import Evaluation


class ClassTable:
    """The per-class results of an evaluation: columns [K]."""

    def __init__(self, evaluation: Evaluation, names: Sequence[str]) -> None:
        """`names` [K] must be in class-list order. Raises ValueError if their number is wrong."""
        classes = evaluation.classes
        if len(names) != len(classes.positives):
            raise ValueError(
                f"the evaluation has {len(classes.positives)} classes, but the shards have "
                f"{len(names)}: run `kway eval` again"
            )
        self.names = names
        self.recalls = classes.recalls
        self.positives = classes.positives.numpy()
        # For a class without samples, 0 / 0 gives NaN, as in its other metrics.
        with np.errstate(invalid="ignore"):
            self.accuracy = evaluation.correct.numpy() / self.positives
        self.average_precision = classes.average_precision.numpy()
        self.precision_at = classes.precision_at.numpy()
        self.threshold = classes.threshold.numpy()

    def worst(self, num: int) -> list[int]:
        """Return the IDs of `num` classes with the lowest average precision. Omits classes without
        samples."""
        ids = np.argsort(self.average_precision, kind="stable")  # NaN comes last
        return [j for j in ids.tolist() if self.positives[j] > 0][:num]

    def header(self) -> list[str]:
        """Return the column names of `rows`."""
        at = [f"precision_at_recall_{recall:g}" for recall in self.recalls]
        thresholds = [f"threshold_at_recall_{recall:g}" for recall in self.recalls]
        return ["class", "name", "positives", "accuracy", "average_precision", *at, *thresholds]

    def rows(self) -> Iterator[list[object]]:
        """Yield one row per class. Metrics of a class without samples are empty cells."""
        for j in range(len(self.names)):
            cells: list[object] = [j, self.names[j], int(self.positives[j])]
            if self.positives[j] == 0:
                yield cells + [""] * (2 + 2 * len(self.recalls))
                continue
            measures = [self.accuracy[j], self.average_precision[j], *self.precision_at[j]]
            yield [*cells, *(repr(float(x)) for x in measures), *map(str, self.threshold[j])]


def write_csv(table: ClassTable, path: Path) -> None:
    """Write a table to `path` as UTF-8 CSV with a header, in full precision."""
    with temporary_path(path) as temporary:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.header())
            writer.writerows(table.rows())
        temporary.rename(path)

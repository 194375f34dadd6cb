"""The per-class results of an evaluation as rows and as CSV."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.files import temporary_path
from trainer.evaluation.measure import Evaluation


class ClassTable:
    """The results of the P classes with samples: columns [P], in ascending order of class ID.
    `names` [K] are those of all classes.
    """

    def __init__(self, evaluation: Evaluation, names: Sequence[str]) -> None:
        """`names` [K] must be in class-list order. Raises ValueError if their number is wrong."""
        classes, num_classes = evaluation.classes, len(evaluation.promises.row_of_class)
        if len(names) != num_classes:
            raise ValueError(
                f"the evaluation has {num_classes} classes, but the shards have {len(names)}: run "
                "`kway eval` again"
            )
        self.names = names
        self.class_ids = classes.class_ids.numpy()
        self.recalls = classes.recalls
        self.positives = classes.positives.numpy()
        self.accuracy = evaluation.correct.numpy() / self.positives
        self.average_precision = classes.average_precision.numpy()
        self.precision_at = classes.precision_at.numpy()
        self.threshold = classes.threshold.numpy()

    def worst(self, num: int) -> list[int]:
        """Return the rows of `num` classes with the lowest average precision."""
        return np.argsort(self.average_precision, kind="stable")[:num].tolist()

    def header(self) -> list[str]:
        """Return the column names of `rows`."""
        at = [f"precision_at_recall_{recall:g}" for recall in self.recalls]
        thresholds = [f"threshold_at_recall_{recall:g}" for recall in self.recalls]
        return ["class", "name", "positives", "accuracy", "average_precision", *at, *thresholds]

    def rows(self) -> Iterator[list[object]]:
        """Yield one row per class. Metrics of a class without samples are empty cells."""
        row = 0
        for class_id, name in enumerate(self.names):
            if row == len(self.class_ids) or self.class_ids[row] != class_id:
                yield [class_id, name, 0] + [""] * (2 + 2 * len(self.recalls))
                continue
            measures = [self.accuracy[row], self.average_precision[row], *self.precision_at[row]]
            cells = [*(repr(float(x)) for x in measures), *map(str, self.threshold[row])]
            yield [class_id, name, int(self.positives[row]), *cells]
            row += 1


def write_csv(table: ClassTable, path: Path) -> None:
    """Write a table to `path` as UTF-8 CSV with a header, in full precision."""
    with temporary_path(path) as temporary:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.header())
            writer.writerows(table.rows())
        temporary.rename(path)

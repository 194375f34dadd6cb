"""Saved evaluations: metrics as JSON, per-class results as safetensors, and as a table in CSV."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from data.classes.columns import write_columns
from data.files import commit, temporary_path
from data.retry import retried
from heads.slc import ClassMeasures
from trainer.evaluation.measure import Evaluation
from trainer.promises import Promises

_OF_CLASSES = ("class_ids", "positives", "average_precision", "precision_at", "threshold")
_OF_PROMISES = ("row_of_class", "thresholds", "kinds", "pass_rates", "pooled", "below_pooled")
_OTHERS = ("reached", "correct", "confusions")
_NOT_METRICS = ("step", "samples")


def save_evaluation(folder: Path, evaluation: Evaluation, *, step: int) -> None:
    """Write `step-….json` (metrics) and `step-….safetensors` (per class) into `folder`."""
    retried(str(folder), lambda: folder.mkdir(parents=True, exist_ok=True))
    classes = evaluation.classes
    columns = {name: getattr(classes, name).numpy() for name in _OF_CLASSES}
    columns |= {name: getattr(evaluation, name).numpy() for name in _OTHERS}
    columns |= {name: getattr(evaluation.promises, name) for name in _OF_PROMISES}
    columns["recalls"] = np.array(classes.recalls)
    columns["confidence"] = np.array(evaluation.promises.confidence)
    path = folder / f"step-{step:08d}.safetensors"
    commit(path, lambda file: write_columns(file, columns))
    summary = {"step": step, "samples": evaluation.num_samples, **evaluation.metrics}
    commit(path.with_suffix(".json"), json.dumps(summary, indent=1).encode())


def load_evaluation(folder: Path, *, step: int) -> Evaluation:
    """Load a saved evaluation. Raises FileNotFoundError if it does not exist, and
    ValueError if it is damaged or from an older version."""
    path = folder / f"step-{step:08d}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: run `kway eval` on the run first")
    try:
        tensors = load_file(path)
        summary = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        classes = ClassMeasures(
            recalls=tuple(tensors["recalls"].tolist()),
            **{name: tensors[name] for name in _OF_CLASSES},
        )
        positives = classes.positives.numpy().astype(np.int32)
        promises = Promises(
            recalls=classes.recalls,
            confidence=float(tensors["confidence"]),
            positives=np.pad(positives, (0, len(tensors["kinds"]) - len(positives))),
            **{name: tensors[name].numpy() for name in _OF_PROMISES},
        )
        others = {name: tensors[name] for name in _OTHERS}
        metrics = {name: value for name, value in summary.items() if name not in _NOT_METRICS}
        return Evaluation(metrics, classes, promises, num_samples=summary["samples"], **others)
    except KeyError as error:
        raise ValueError(
            f"{path} has no {error}, because it was written by an older version of kway: run "
            "`kway eval` again"
        ) from error
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run `kway eval` again") from error


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

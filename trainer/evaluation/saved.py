"""Saved evaluations: metrics as JSON and per-class results as safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from data.classes.columns import write_columns
from data.files import commit
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

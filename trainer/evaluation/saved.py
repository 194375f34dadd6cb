"""Saved evaluations: metrics as JSON and per-class results as safetensors."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from data.files import commit
from data.retry import retried
from heads.slc import ClassMeasures
from trainer.evaluation.measure import Evaluation
from trainer.promises import Promises

_OF_CLASSES = ("positives", "average_precision", "precision_at", "threshold")
_OF_PROMISES = ("thresholds", "kinds", "pass_rates", "pooled", "below_pooled")
_OTHERS = ("reached", "correct", "confusions")
_NOT_METRICS = ("step", "samples")


def save_evaluation(folder: Path, evaluation: Evaluation, *, step: int) -> None:
    """Write `step-….json` (metrics) and `step-….safetensors` (per class) into `folder`."""
    retried(str(folder), lambda: folder.mkdir(parents=True, exist_ok=True))
    classes = evaluation.classes
    tensors = {name: getattr(classes, name) for name in _OF_CLASSES}
    tensors |= {name: getattr(evaluation, name) for name in _OTHERS}
    tensors["recalls"] = torch.tensor(classes.recalls, dtype=torch.float64)
    promises = evaluation.promises
    tensors |= {name: torch.from_numpy(getattr(promises, name)) for name in _OF_PROMISES}
    tensors["confidence"] = torch.tensor(promises.confidence, dtype=torch.float64)
    path = folder / f"step-{step:08d}.safetensors"
    commit(path, save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}))
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
            class_ids=torch.arange(len(tensors["positives"])),
            recalls=tuple(tensors["recalls"].tolist()),
            **{name: tensors[name] for name in _OF_CLASSES},
        )
        promises = Promises(
            recalls=classes.recalls,
            confidence=float(tensors["confidence"]),
            positives=classes.positives.numpy().astype(np.int32),
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

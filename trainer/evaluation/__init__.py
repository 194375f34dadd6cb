"""Exact distributed evaluation of a split: measures, thresholds, per-class results, confusions."""

from trainer.evaluation.marginals import MarginalTopK
from trainer.evaluation.measure import Evaluation, evaluate, evaluate_split, measure
from trainer.evaluation.saved import load_evaluation, save_evaluation
from trainer.evaluation.stopping import EvaluationStopped

__all__ = [
    "Evaluation",
    "EvaluationStopped",
    "MarginalTopK",
    "evaluate",
    "evaluate_split",
    "load_evaluation",
    "measure",
    "save_evaluation",
]

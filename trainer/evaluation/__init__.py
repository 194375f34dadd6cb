"""Exact distributed evaluation of a split: metrics, thresholds, per-class results and
confusions.
"""

from trainer.evaluation.measure import Evaluation, evaluate_split, measure
from trainer.evaluation.saved import load_evaluation, save_evaluation

__all__ = [
    "Evaluation",
    "evaluate_split",
    "load_evaluation",
    "measure",
    "save_evaluation",
]

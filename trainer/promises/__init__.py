"""Per-class thresholds, each with a stated meaning: guaranteed, shrunk or pooled."""

from trainer.promises.bounds import least_positives, wilson_interval
from trainer.promises.class_groups import groups_of_head, groups_of_rows
from trainer.promises.thresholds import KINDS, Kind, Promises, make_promises

__all__ = [
    "KINDS",
    "Kind",
    "Promises",
    "groups_of_head",
    "groups_of_rows",
    "least_positives",
    "make_promises",
    "wilson_interval",
]

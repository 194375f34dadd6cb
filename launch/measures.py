"""Display names of evaluation metrics, and which of them are ratios."""

import re

_LABELS = (
    (r"top(\d+)", "top-{} accuracy"),
    (r"marginal_top(\d+)", "marginalized top-{} accuracy"),
    (r"sa", "similarity accuracy (SA)"),
    (r"auprc", "AUPRC"),
    (r"precision_at_recall_([\d.e-]+)", "precision at recall {}"),
    (r"(precision|recall)_at_(\d+)", "{} at {}"),
    (r"ndcg_at_(\d+)", "nDCG at {}"),
    (r"psp_at_(\d+)", "propensity-scored precision (PSP) at {}"),
    (r"(micro|macro)_f1_at_recall_([\d.e-]+)", "{} F1 at thresholds for recall {}"),
)


def measure_label(name: str) -> str:
    """The display name of a metric, such as `top-1 accuracy` for `top1`; `name` if unknown."""
    return _known_label(name) or name


def is_ratio(name: str) -> bool:
    """Whether a metric is a ratio and is therefore displayed as a percentage."""
    return _known_label(name) is not None


def _known_label(name: str) -> str | None:
    for pattern, label in _LABELS:
        if found := re.fullmatch(pattern, name):
            return label.format(*found.groups())
    return None

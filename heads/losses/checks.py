"""Bounds on the hyperparameters of losses, which hold for losses that no recipe made, too.

One bound a parameter; what depends on the number of classes is `Loss.check_classes`.
"""

import math


def at_least(kind: str, name: str, value: float, low: float) -> None:
    """ValueError unless `value` is finite and `low` or more."""
    if not low <= value < math.inf:
        raise ValueError(f"{kind} {name} is {value}: give a finite number of {low} or more")


def above(kind: str, name: str, value: float, low: float) -> None:
    """ValueError unless `value` is finite and above `low`."""
    if not low < value < math.inf:
        raise ValueError(f"{kind} {name} is {value}: give a finite number above {low}")

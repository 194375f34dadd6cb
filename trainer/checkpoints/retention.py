"""Which checkpoints stay: a pure function of their steps and of what was measured at each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stored:
    """A committed checkpoint's step and, where there was an evaluation, its measure."""

    step: int
    best: float | None = None


@dataclass(frozen=True)
class Retention:
    """The newest `last`; multiples of `every_steps`; the best by `mode` (max or min)."""

    last: int
    every_steps: int | None = None
    mode: Literal["max", "min"] | None = None


def superseded(stored: Sequence[Stored], retention: Retention) -> set[int]:
    """Steps that may be deleted; never the newest. Of equal measures the first one is the best."""
    kept = set(sorted(one.step for one in stored)[-retention.last :])
    if retention.every_steps is not None:
        kept |= {one.step for one in stored if one.step % retention.every_steps == 0}
    if retention.mode is not None:
        kept |= _best(stored, sign=1 if retention.mode == "max" else -1)
    return {one.step for one in stored} - kept


def _best(stored: Sequence[Stored], *, sign: int) -> set[int]:
    measured = [
        (sign * one.best, -one.step)
        for one in stored
        if one.best is not None and math.isfinite(one.best)
    ]
    return {-max(measured)[1]} if measured else set()

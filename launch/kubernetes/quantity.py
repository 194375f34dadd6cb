"""Amounts of resources as Kubernetes writes them: 500m, 2, 1.5Gi."""

import re
from decimal import Decimal

_BINARY = {suffix + "i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
_DECIMAL = {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_FACTORS = {"": Decimal(1), "m": Decimal("0.001"), **_BINARY, **_DECIMAL}


def quantity(text: object) -> Decimal:
    """`2Gi` -> 2147483648, `500m` -> 0.5; ValueError for what is none."""
    number, unit = _parts(text)
    return number * _FACTORS[unit]


def times(text: object, factor: int) -> str:
    """`8Gi` x 4 -> `32Gi`, in the same unit; ValueError for what is no amount."""
    number, unit = _parts(text)
    return f"{number * factor}{unit}"


def _parts(text: object) -> tuple[Decimal, str]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]{0,2})", str(text))
    if found is None or found[2] not in _FACTORS:
        raise ValueError(f"{text!r} is no amount: write it as 500m, 2 or 1.5Gi")
    return Decimal(found[1]), found[2]

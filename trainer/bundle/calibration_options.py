"""The options of `kway calibrate` and `kway quantize`. Does not import torch."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from data.option import Option, Supplied

Recalls = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1)], ...], AfterValidator(lambda r: tuple(sorted(set(r))))
]


@dataclass(frozen=True)
class CalibrationOptions:
    """Labeled samples, the thresholds to compute from them, and how the backbone runs."""

    split: str = Field("test", description="split of the shards")
    recalls: Annotated[Recalls, Option("--recall", metavar="R,…")] = Field(
        (0.9, 0.99),
        min_length=1,
        description="recalls for which to compute thresholds (above 0, at most 1); can be repeated",
    )
    confidence: float = Field(
        0.9, gt=0, lt=1, description="confidence of the guarantees and intervals of the thresholds"
    )
    batch: int = Field(64, ge=1, description="number of samples per forward pass")
    workers: int = Field(0, ge=0, description="number of loader processes")
    device: Literal["cpu", "cuda"] = Field("cpu", description="device of the backbone")
    allow_imports: Annotated[tuple[str, ...], Supplied()] = ()

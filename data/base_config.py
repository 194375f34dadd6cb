"""The base class of recipe models, and training durations."""

import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)


class FrozenConfig(BaseModel):
    """A read-only model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Duration(FrozenConfig):
    """A training duration in exactly one unit."""

    steps: int | None = Field(None, ge=0)
    epochs: float | None = Field(None, ge=0)
    samples: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_unit(self) -> "Duration":
        if sum(v is not None for v in (self.steps, self.epochs, self.samples)) != 1:
            raise ValueError("set exactly one of steps, epochs, samples")
        return self

    def in_steps(self, *, num_samples: int, global_batch: int) -> int:
        """Return the duration in optimizer steps, rounded up. num_samples: the number of samples
        per epoch.
        """
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return -(-self.samples // global_batch)
        assert self.epochs is not None
        return math.ceil(self.epochs * num_samples / global_batch)


def _not_zero(duration: Duration) -> Duration:
    if 0 in (duration.steps, duration.epochs, duration.samples):
        raise ValueError("an interval must be longer than 0: set a positive number")
    return duration


Interval = Annotated[Duration, AfterValidator(_not_zero)]


def or_instance(base: type) -> WrapValidator:
    """Return a validator for a union of built-in kinds that also accepts instances of `base`.

    `trainer/imports.py` creates such instances from user-defined subclasses.
    """

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, base) else validate(value)

    return WrapValidator(validated)

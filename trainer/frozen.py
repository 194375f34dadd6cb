"""The base of every model of a recipe: frozen, and strict about unknown keys."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, WrapValidator


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def or_instance(base: type) -> WrapValidator:
    """Validates a union of built-in kinds, and accepts an instance of any other subclass of `base`
    as it is: `trainer/imports.py` has made it."""

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, base) else validate(value)

    return WrapValidator(validated)

"""The base of the models that a recipe's `data` is made of."""

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """Read-only, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""The recipe's optimizers and learning-rate schedules. Free of torch; `trainer/config.py` holds the
rest of the recipe."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.duration import Duration


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Beta = Annotated[float, Field(ge=0, lt=1)]


class HeadOptimizerConfig(_Config):
    """What the head does otherwise than the backbone; None: the same."""

    lr: float | None = Field(None, gt=0, description="peak rate; the schedule is the same")
    weight_decay: float | None = Field(None, ge=0)


class SGDConfig(_Config):
    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    head: HeadOptimizerConfig = HeadOptimizerConfig()
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(5e-4, ge=0)

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "SGDConfig":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class AdamWConfig(_Config):
    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    head: HeadOptimizerConfig = HeadOptimizerConfig()
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)


class LambConfig(_Config):
    """LAMB (You et al. 2020): Adam whose step of each tensor is as long as the tensor's norm."""

    kind: Literal["lamb"] = "lamb"
    lr: float = Field(2e-3, gt=0)
    head: HeadOptimizerConfig = HeadOptimizerConfig()
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)


class CosineConfig(_Config):
    """Linear warm-up, then half a cosine from the full rate down to `final` times it."""

    kind: Literal["cosine"] = "cosine"
    warmup: Duration = Duration(steps=0)
    final: float = Field(0.0, ge=0, le=1)


class LinearConfig(_Config):
    """Linear warm-up, then a line from the full rate down to `final` times it."""

    kind: Literal["linear"] = "linear"
    warmup: Duration = Duration(steps=0)
    final: float = Field(0.0, ge=0, le=1)


class StepConfig(_Config):
    """Linear warm-up, then the rate is multiplied by `factor` at each milestone."""

    kind: Literal["step"] = "step"
    warmup: Duration = Duration(steps=0)
    milestones: tuple[Duration, ...]
    factor: float = Field(0.1, gt=0, lt=1)


OptimizerConfig = Annotated[SGDConfig | AdamWConfig | LambConfig, Field(discriminator="kind")]
ScheduleConfig = Annotated[CosineConfig | LinearConfig | StepConfig, Field(discriminator="kind")]

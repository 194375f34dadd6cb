"""Learning-rate schedules. The learning rate is a pure function of the step.

To add a schedule, write a subclass of `ScheduleKind` here and add it to `Schedule`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator, Field, SerializeAsAny

from data.base_config import Duration, FrozenConfig, or_instance


@dataclass(frozen=True)
class RunLength:
    """The length of a run in optimizer steps, with the number of samples per epoch and per step."""

    num_steps: int
    num_samples: int
    global_batch: int

    def in_steps(self, duration: Duration) -> int:
        return duration.in_steps(num_samples=self.num_samples, global_batch=self.global_batch)


class ScheduleKind(FrozenConfig, ABC):
    """A linear warmup followed by `after_warmup`."""

    kind: str
    warmup: Duration = Duration(steps=0)

    def rate_factor(self, step: int, length: RunLength) -> float:
        """Return the factor that multiplies the peak learning rates at `step`, which ranges from 0
        to num_steps - 1.
        """
        warmup = length.in_steps(self.warmup)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, length.num_steps - warmup)
        return self.after_warmup(step, min(1.0, progress), length)

    @abstractmethod
    def after_warmup(self, step: int, progress: float, length: RunLength) -> float:
        """Return the factor at `step`. `progress` grows from 0 at the end of the warmup to 1 at the
        end of the run."""


class Cosine(ScheduleKind):
    """Half a cosine from the peak learning rate to `final` times the peak (Loshchilov and Hutter
    2017).
    """

    kind: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)

    def after_warmup(self, step: int, progress: float, length: RunLength) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


class Linear(ScheduleKind):
    """Linear decay from the peak learning rate to `final` times the peak."""

    kind: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0, le=1)

    def after_warmup(self, step: int, progress: float, length: RunLength) -> float:
        return 1 - (1 - self.final) * progress


class Step(ScheduleKind):
    """Step decay: the learning rate is multiplied by `factor` at each milestone."""

    kind: Literal["step"] = "step"
    milestones: tuple[Duration, ...]
    factor: float = Field(0.1, gt=0, lt=1)

    def after_warmup(self, step: int, progress: float, length: RunLength) -> float:
        return self.factor ** sum(step >= length.in_steps(m) for m in self.milestones)


Schedule = Annotated[
    SerializeAsAny[Cosine | Linear | Step], Discriminator("kind"), or_instance(ScheduleKind)
]

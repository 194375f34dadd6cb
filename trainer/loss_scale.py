"""Dynamic loss scaling for fp16. It keeps small gradients from underflowing; a step that overflows
is skipped."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_INITIAL, _LOWEST, _HIGHEST = 2.0**16, 2.0**-14, 2.0**24
_GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """The factor by which the loss is multiplied before backward. It is always 1 unless `dynamic`
    is true.

    All ranks compute the same global gradient norm, so their scales are always equal.

    If steps are deferred (`trainer/step.py`), the device computes the scale for the
    next step. The host repeats this computation when it reads the results of a step.
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0
    _on_device: Tensor | None = field(
        default=None, repr=False, compare=False
    )  # [value, good_steps]

    @classmethod
    def for_precision(cls, precision: str) -> "LossScale":
        dynamic = precision == "fp16"
        return cls(dynamic, _INITIAL if dynamic else 1.0)

    def overflowed(self) -> bool:
        """Halve the scale after non-finite gradients. Returns False if the scale is not dynamic or
        is already at its minimum, in which case a lower scale cannot make the step finite.
        """
        if not self.dynamic or self.value <= _LOWEST:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def succeeded(self) -> None:
        """Count a step without overflow, and double the scale after many consecutive steps without
        overflow.
        """
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps >= _GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, _HIGHEST), 0

    def on_device(self, device: torch.device) -> Tensor | float:
        """Return the scale for the next deferred step."""
        if not self.dynamic:
            return 1.0
        if self._on_device is None:
            numbers = [self.value, float(self.good_steps)]
            self._on_device = torch.tensor(numbers, dtype=torch.float32, device=device)
        return self._on_device[0]

    def update_on_device(self, loss: Tensor, skipped: Tensor) -> None:
        """Do what `overflowed` and `succeeded` do, on the device, where `skipped` is known."""
        if self._on_device is None:
            return
        value, good_steps = self._on_device
        overflow = skipped & loss.isfinite() & (value > _LOWEST)
        grows = ~skipped & (good_steps + 1 >= _GROWTH_INTERVAL)
        doubled = (value * 2).clamp(max=_HIGHEST)
        self._on_device = torch.stack(
            [
                torch.where(overflow, value / 2, torch.where(grows, doubled, value)),
                torch.where(overflow | grows, 0, good_steps + ~skipped),
            ]
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, or None without dynamic scaling. Without a stored
        state, a run that resumes in fp16 starts with the default scale.
        """
        if not self.dynamic:
            return None
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, saved: dict[str, Any]) -> None:
        if self.dynamic:
            self.value, self.good_steps = float(saved["value"]), int(saved["good_steps"])
            self._on_device = None

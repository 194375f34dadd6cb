"""Dynamic loss scaling for fp16. It keeps small gradients from underflowing; a step that overflows
is skipped."""

import math
from typing import Any

import torch
from torch import Tensor

_INITIAL, _LOWEST, _HIGHEST = 2.0**16, 2.0**-14, 2.0**24
_GROWTH_INTERVAL = 2000


class LossScale:
    """The factor by which the loss is multiplied before backward. It is always 1 unless `precision`
    is fp16.

    All ranks compute the same global gradient norm, so their scales are always equal. The device
    computes the scale for the next step, because the host may not know yet whether the last step
    was skipped (`trainer/step.py`).
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        # The scale, and the number of consecutive steps without overflow.
        self._state: Tensor | None = None
        if precision == "fp16":
            self._state = torch.tensor([_INITIAL, 0.0], device=device)

    @property
    def value(self) -> Tensor | float:
        """The scale of the next step."""
        return 1.0 if self._state is None else self._state[0]

    def update(self, loss: Tensor, skipped: Tensor) -> None:
        """Halve the scale after non-finite gradients of a finite loss, unless it is at its minimum.
        Double it after many consecutive steps without overflow."""
        if self._state is None:
            return
        value, good_steps = self._state
        overflow = skipped & loss.isfinite() & (value > _LOWEST)
        grows = ~skipped & (good_steps + 1 >= _GROWTH_INTERVAL)
        doubled = (value * 2).clamp(max=_HIGHEST)
        self._state = torch.stack(
            [
                torch.where(overflow, value / 2, torch.where(grows, doubled, value)),
                torch.where(overflow | grows, 0, good_steps + ~skipped),
            ]
        )

    def overflows(self, loss: float, scale: float) -> bool:
        """Return whether a skipped step with this loss was skipped because of its scale. At the
        minimum, a lower scale cannot make the step finite."""
        return self._state is not None and math.isfinite(loss) and scale > _LOWEST

    def to_json(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, or None without dynamic scaling. Without a stored
        state, a run that resumes in fp16 starts with the default scale.
        """
        if self._state is None:
            return None
        value, good_steps = self._state.tolist()
        return {"value": value, "good_steps": int(good_steps)}

    def restore(self, saved: dict[str, Any]) -> None:
        if self._state is not None:
            state = [float(saved["value"]), float(saved["good_steps"])]
            self._state = torch.tensor(state, device=self._state.device)

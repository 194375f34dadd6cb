"""Dynamic loss scaling for fp16: small gradients must not vanish, and an overflow skips a step."""

from dataclasses import dataclass
from typing import Any

_FIRST, _LOWEST, _HIGHEST = 2.0**16, 2.0**-14, 2.0**24
_GROWS_AFTER = 2000


@dataclass
class LossScale:
    """What the loss is multiplied by before backward; 1 for ever unless `dynamic`.

    All ranks see the same global norm, so their scales never differ.
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0

    @classmethod
    def for_precision(cls, precision: str) -> "LossScale":
        dynamic = precision == "fp16"
        return cls(dynamic, _FIRST if dynamic else 1.0)

    def overflowed(self) -> bool:
        """Lower the scale after gradients that are not finite; False where that cannot help, and
        the step is as bad as one in full precision."""
        if not self.dynamic or self.value <= _LOWEST:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def fitted(self) -> None:
        """Raise the scale after many steps without overflow."""
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps >= _GROWS_AFTER:
            self.value, self.good_steps = min(self.value * 2, _HIGHEST), 0

    def to_json(self) -> dict[str, Any] | None:
        """None where there is none: a run that goes on in fp16 begins with a scale of its own."""
        if not self.dynamic:
            return None
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, saved: dict[str, Any]) -> None:
        if self.dynamic:
            self.value, self.good_steps = float(saved["value"]), int(saved["good_steps"])

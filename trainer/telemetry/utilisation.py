"""MFU: the share of a device's peak that goes into the operations of the model (PaLM, app. B)."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.telemetry.devices import Precision, device_named
from trainer.telemetry.flops import ModelFlops


def peak_flops(
    device: torch.device, precision: Precision, given_tflops: float | None
) -> float | None:
    """Operations a second that `device` can do at most; None where nobody has said.

    `given_tflops` of the recipe goes before the table of devices.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    known = device_named(torch.cuda.get_device_name(device))
    return None if known is None else known.peak_flops(precision)


class Utilisation:
    """Adds up the operations of this rank's rows; there is none where no peak is known."""

    def __init__(
        self, flops: ModelFlops | None, peak: float | None, say: Callable[[str], None]
    ) -> None:
        self._flops, self._peak, self._say = flops, peak, say
        self._operations = 0.0

    def add(self, inputs: dict[str, Tensor]) -> None:
        """Rows [b, ...] that this rank trained on."""
        if self._flops is None or self._peak is None:
            return
        try:
            per_row = self._flops.per_row(inputs)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            self._give_up(f"the operations of the encoder cannot be counted ({reason})")
            return
        if per_row is None:
            self._give_up("this head makes no row of logits")
            return
        self._operations += per_row * len(next(iter(inputs.values())))

    def take(self, seconds: float) -> float | None:
        """The share of the peak over `seconds`, since the last call; None: not known."""
        if self._flops is None or self._peak is None:
            return None
        share = self._operations / seconds / self._peak
        self._operations = 0.0
        return share

    def _give_up(self, reason: str) -> None:
        self._peak = None
        self._say(f"no MFU: {reason}")

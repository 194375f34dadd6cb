"""What a run tells about itself while it goes on: numbers, progress and where its time goes.

Names load on first use, so that `trainer.telemetry.devices` stays free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.telemetry.flops import ModelFlops
    from trainer.telemetry.phases import PHASES, Phase, Phases
    from trainer.telemetry.telemetry import Telemetry, check_telemetry

__all__ = ["PHASES", "ModelFlops", "Phase", "Phases", "Telemetry", "check_telemetry"]

_HOME = {
    "ModelFlops": "trainer.telemetry.flops",
    "PHASES": "trainer.telemetry.phases",
    "Phase": "trainer.telemetry.phases",
    "Phases": "trainer.telemetry.phases",
    "Telemetry": "trainer.telemetry.telemetry",
    "check_telemetry": "trainer.telemetry.telemetry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.telemetry' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

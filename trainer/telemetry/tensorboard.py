"""Writes the numbers of a run as TensorBoard events to RUN/tensorboard."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.extras import install_command


def check_tensorboard() -> None:
    """Raise ValueError if the optional package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise ValueError(
            "telemetry.tensorboard is true, but the package tensorboard is not installed: run "
            f"{install_command('tensorboard')}, or set telemetry.tensorboard=false"
        )


class TensorBoard:
    """Writes scalars by step. TensorBoard hides the data for steps after `start_step` that earlier
    processes wrote.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports the optional package

        purge_step = start_step + 1 if start_step else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, numbers: dict[str, Any], *, under: str = "") -> None:
        """Write the numbers of a step. A nested dict becomes a group named after its key."""
        for name, value in numbers.items():
            if isinstance(value, dict):
                self.write(step, value, under=f"{name}/")
            elif isinstance(value, int | float):
                self._writer.add_scalar(under + name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

"""The numbers of a run as TensorBoard events, in RUN/tensorboard."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check_tensorboard() -> None:
    """Raises ValueError where the optional package is not there."""
    if find_spec("tensorboard") is None:
        raise ValueError(
            "telemetry.tensorboard is true and the package tensorboard is not installed: "
            "pip install 'kway[tensorboard]', or set it to false"
        )


class TensorBoard:
    """Scalars by step; what earlier processes wrote of steps after `start_step` is not drawn."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads the optional package

        purge_step = start_step + 1 if start_step else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, numbers: dict[str, Any], *, under: str = "") -> None:
        """Numbers of a step; those in a dict of their own go to a group of its name."""
        for name, value in numbers.items():
            if isinstance(value, dict):
                self.write(step, value, under=f"{name}/")
            elif isinstance(value, int | float):
                self._writer.add_scalar(under + name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

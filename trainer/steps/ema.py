"""The moving average of the weights that a run with `train.ema` evaluates and exports."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.config import EmaConfig


class MovingAverage:
    """Exponential moving averages of this rank's pieces of the weights, by name.

    `live` contains the tensors that the optimizers update in place. They may be full or sharded:
    averaging is elementwise, so each rank averages its own pieces without communication.
    """

    def __init__(self, config: EmaConfig, live: Mapping[str, Tensor]) -> None:
        self.config = config
        self.averages = {name: tensor.clone() for name, tensor in live.items()}

    @torch.no_grad()
    def update(
        self, live: Mapping[str, Tensor], *, step: int, skipped: Tensor | None = None
    ) -> None:
        """Update the averages with the weights after `step` (counted from 1).

        The averages do not change if `skipped`, a scalar on their device, is true.
        """
        weight = 1 - self.decay_at(step)
        if skipped is not None:
            # torch has no foreach lerp with a scalar weight on the device, and a sequence of other
            # foreach operations would allocate a copy of all averages.
            changed = torch.where(skipped, 0.0, weight)
            for name, average in self.averages.items():
                average.lerp_(live[name], changed.to(average.dtype))
        elif self.averages:
            averages = list(self.averages.values())
            torch._foreach_lerp_(averages, [live[name] for name in self.averages], weight)

    def decay_at(self, step: int) -> float:
        """Return the decay at `step`. Warmup lowers the decay in early steps, so that the initial
        weights lose their influence quickly.
        """
        if not self.config.warmup:
            return self.config.decay
        return min(self.config.decay, (1 + step) / (10 + step))

    @contextmanager
    def swapped_in(self, live: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Swap the weights and the averages inside the context."""
        self._swap(live())
        try:
            yield
        finally:
            self._swap(live())

    @torch.no_grad()
    def _swap(self, live: Mapping[str, Tensor]) -> None:
        for name, average in self.averages.items():
            weight = live[name].clone()
            live[name].copy_(average)
            average.copy_(weight)

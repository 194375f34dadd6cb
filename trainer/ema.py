"""The moving average of the weights that a run with `train.ema` evaluates and exports."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.config import EmaConfig

_ROWS_AT_ONCE = 8192


class MovingAverage:
    """Exponential moving averages of this rank's pieces of the weights, by name.

    `live` contains the tensors that the optimizers update in place. They may be full or sharded:
    averaging is elementwise, so each rank averages its own pieces without communication. The
    averages of bf16 weights are float32.
    """

    def __init__(self, config: EmaConfig, live: Mapping[str, Tensor]) -> None:
        self.config = config
        self.averages = {
            name: tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for name, tensor in live.items()
        }
        self._dtypes = {average.dtype for average in self.averages.values()}
        self._rounded = [
            name for name, average in self.averages.items() if average.dtype != live[name].dtype
        ]

    @torch.no_grad()
    def update(
        self, live: Mapping[str, Tensor], *, step: int, skipped: Tensor | None = None
    ) -> None:
        """Update the averages with the weights after `step` (counted from 1).

        The averages do not change if `skipped`, a scalar on their device, is true.
        """
        # The weight is on the device, because `skipped` is. torch has no foreach lerp with such a
        # weight, and other foreach operations would allocate a copy of all averages.
        device = next(iter(self.averages.values())).device
        weight = torch.full((), 1 - self.decay_at(step), dtype=torch.float64, device=device)
        if skipped is not None:
            weight = weight.where(~skipped, 0)
        weights = {dtype: weight.to(dtype) for dtype in self._dtypes}
        for name, average in self.averages.items():
            for part, new in _pieces(average, live[name]):
                part.lerp_(new.to(part.dtype), weights[part.dtype])

    def decay_at(self, step: int) -> float:
        """Return the decay at `step`. Warmup lowers the decay in early steps, so that the initial
        weights lose their influence quickly.
        """
        if not self.config.warmup:
            return self.config.decay
        return min(self.config.decay, (1 + step) / (10 + step))

    @contextmanager
    def swapped_in(self, live: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Swap the weights and the averages inside the context. bf16 weights are replaced by their
        rounded averages."""
        before = live()
        kept = {name: before[name].clone() for name in self._rounded}
        self._swap(before)
        for name in kept:
            before[name].copy_(self.averages[name])
        try:
            yield
        finally:
            after = live()
            self._swap(after)
            for name, weight in kept.items():
                after[name].copy_(weight)

    @torch.no_grad()
    def _swap(self, live: Mapping[str, Tensor]) -> None:
        for name, average in self.averages.items():
            if name not in self._rounded:
                weight = live[name].clone()
                live[name].copy_(average)
                average.copy_(weight)


def _pieces(average: Tensor, live: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return both tensors in pieces if their dtypes differ, so that no float32 copy of all weights
    is needed."""
    if average.dtype == live.dtype:
        return [(average, live)]
    return zip(average.split(_ROWS_AT_ONCE), live.split(_ROWS_AT_ONCE), strict=True)

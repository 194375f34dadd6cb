"""Batches of samples of about one length, so that little of a batch is filling.

The stream is cut into windows of a few batches. A window's samples are sorted by length, cut into
batches, and the batches are shuffled: a function of the order and the lengths alone, so batches
depend neither on the topology nor on where a run was resumed. A window, and so a batch, may hold
the end of one epoch and the beginning of the next.
"""

from collections.abc import Callable

import numpy as np

from data.loading.order import permuted_index

# Positions of the stream, int64 [n] -> their epochs and samples, int64 [n] each.
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

_STREAM = 0x6C656E67  # "leng": keeps these draws apart from those of the order


class ByLength:
    """An order whose windows of `num_batches` batches are sorted by length.

    locate: the order below. lengths: samples int64 [n] -> their lengths [n].
    """

    def __init__(
        self,
        locate: Locate,
        lengths: Callable[[np.ndarray], np.ndarray],
        *,
        seed: int,
        batch: int,
        num_batches: int,
    ) -> None:
        self._locate = locate
        self._lengths = lengths
        self._seed = seed
        self._batch = batch
        self._num_batches = num_batches
        # The window asked for last: a reader asks for its positions one batch after the other.
        self._window: tuple[int, np.ndarray, np.ndarray] | None = None

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, sample), int64 [n], of positions of the stream [n]."""
        positions = np.asarray(positions, np.int64)
        windows, inside = np.divmod(positions, self._batch * self._num_batches)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        for window in np.unique(windows).tolist():
            here = windows == window
            sorted_epochs, sorted_samples = self._sorted(window)
            epochs[here] = sorted_epochs[inside[here]]
            samples[here] = sorted_samples[inside[here]]
        return epochs, samples

    def _sorted(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        if self._window is None or self._window[0] != window:
            size = self._batch * self._num_batches
            epochs, samples = self._locate(np.arange(window * size, (window + 1) * size))
            # Stable: which of two samples of one length comes first is the order's.
            by_length = np.argsort(self._lengths(samples), kind="stable")
            batches = permuted_index(
                self._seed ^ _STREAM, window, np.arange(self._num_batches), self._num_batches
            )
            by_length = by_length.reshape(self._num_batches, self._batch)[batches].reshape(-1)
            self._window = window, epochs[by_length], samples[by_length]
        return self._window[1:]

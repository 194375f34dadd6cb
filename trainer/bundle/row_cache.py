"""Rows that were asked for lately, kept in memory up to a number of bytes.

The kernel's page cache keeps them, too, but gives them up when memory is short, as in a container
whose limit is below the size of the head.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

# What Python holds beside a row's numbers, roughly.
_EXTRA_BYTES = 250
# A question for more than this share of what fits would drive all others out.
_LARGE = 8


class HotRows:
    """Rows by number, those not asked for longest leaving first. Threads may use it together."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, rows: Sequence[int], out: np.ndarray) -> list[int]:
        """Fill `out` [n, width] where a row is held; the places of those that are not."""
        if self._is_large(rows, out):
            return list(range(len(rows)))
        missing = []
        with self._lock:
            for place, row in enumerate(rows):
                held = self._held.get(row)
                if held is None:
                    missing.append(place)
                    continue
                out[place] = held
                self._held.move_to_end(row)
        return missing

    def keep(self, rows: Sequence[int], places: Sequence[int], out: np.ndarray) -> None:
        """Hold the rows of `out` [n, width] at `places`."""
        if self._is_large(rows, out):
            return
        most = self._max_bytes // _bytes_of(out)
        with self._lock:
            for place in places:
                self._held[rows[place]] = out[place].copy()
            while len(self._held) > most:
                self._held.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held)

    def _is_large(self, rows: Sequence[int], out: np.ndarray) -> bool:
        return len(rows) * _bytes_of(out) * _LARGE > self._max_bytes


def _bytes_of(out: np.ndarray) -> int:
    return int(out.shape[1]) * out.itemsize + _EXTRA_BYTES

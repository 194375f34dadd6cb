"""Random numbers keyed by what they are for: a sample of an epoch, or a pair of the stream.

So pixels do not depend on ranks, workers, or where a run was resumed.
"""

from typing import Any

import numpy as np

# Keep the draws apart from other uses of the same seed.
_SAMPLES = 0x6B776179  # "kway"
_PAIRS = 0x70616972  # "pair"


class SampleDraws:
    """A generator of its own for each sample of each epoch, until the next one is asked for.

    It is one generator that moves: to make one costs more than decoding a small picture.
    """

    def __init__(self) -> None:
        self._generator = _generator(0, _SAMPLES, 0, 0)
        self._start = self._generator.bit_generator.state

    def at(self, seed: int, epoch: int, index: int) -> np.random.Generator:
        """The same numbers for the same sample."""
        state: Any = self._start["state"]
        state["key"][0], state["counter"][1], state["counter"][2] = seed, index, epoch
        self._generator.bit_generator.state = self._start
        return self._generator


def pair_rng(seed: int, position: int) -> np.random.Generator:
    """One generator for the positions 2n and 2n + 1 of the endless stream of samples."""
    return _generator(seed, _PAIRS, position // 2, 0)


def _generator(seed: int, stream: int, index: int, epoch: int) -> np.random.Generator:
    """Philox counts in the first word of its counter; the others say who (Salmon et al. 2011)."""
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))

"""Converts the files of a batch to training samples, with random numbers keyed by sample."""

import numpy as np

from data.augment.base import SAMPLES, SampleGenerator
from data.augment.crop import window
from data.augment.philox import as_doubles, as_integers, first_words
from data.augment.training import TrainingImages
from data.images.decode import center_crop, decode

# Computing the random numbers of fewer samples together takes longer than drawing them one by one.
_MIN_TOGETHER = 50


class TrainingBatch:
    """The samples `indices` in `epochs`, int64 [n] each.

    The conversion of row r has two steps: `decode(r, data)`, which raises ValueError if the file is
    damaged, and then `augment(r, decoded)`, before the next call to `decode`. A row may be decoded
    again from other data, such as those of a substitute.
    """

    def __init__(
        self,
        images: TrainingImages,
        generator: SampleGenerator,
        seed: int,
        epochs: np.ndarray,
        indices: np.ndarray,
    ) -> None:
        self._images = images
        self._generator = generator
        self._keys = [(seed, *key) for key in zip(epochs.tolist(), indices.tolist(), strict=True)]

    def decode(self, row: int, data: bytes) -> np.ndarray:
        """Return the decoded crop, uint8 [size, size, C]."""
        return self._images.decoded(data, self._generator.at(*self._keys[row]))

    def augment(self, row: int, decoded: np.ndarray) -> np.ndarray:
        """Return uint8 [C, size, size], a view of an array [size, size, C]."""
        return self._images.augmented(decoded, self._generator.last)


class _ShiftedBatch(TrainingBatch):
    """Like `TrainingBatch`, for `TrainingImages.only_shifts_and_flips`, with the same results.

    For small images, drawing the random numbers one by one takes a sixth of the time of decoding,
    so they are computed together.
    """

    def __init__(
        self,
        images: TrainingImages,
        generator: SampleGenerator,
        seed: int,
        epochs: np.ndarray,
        indices: np.ndarray,
    ) -> None:
        super().__init__(images, generator, seed, epochs, indices)
        self._pad = images.augment.pad
        words = first_words((seed, SAMPLES), epochs, indices)
        # `integers` uses half a word for each number.
        starts, valid = as_integers(words[0], 2 * self._pad + 1)
        flips = as_doubles(words[1 if self._pad else 0])
        for row in np.flatnonzero(~valid).tolist():
            rng = generator.at(*self._keys[row])
            starts[:, row], flips[row] = rng.integers(2 * self._pad + 1, size=2), rng.random()
        self._starts = starts.T.tolist()
        self._flips = (flips < images.augment.flip.root).tolist()

    def decode(self, row: int, data: bytes) -> np.ndarray:
        config = self._images.config
        return center_crop(decode(data, config.channels), config)

    def augment(self, row: int, decoded: np.ndarray) -> np.ndarray:
        if self._pad:
            decoded = window(decoded, self._pad, *self._starts[row], self._images.fill)
        if self._flips[row]:
            decoded = decoded[:, ::-1]
        return decoded.transpose(2, 0, 1)


def training_batch(
    images: TrainingImages,
    generator: SampleGenerator,
    seed: int,
    epochs: np.ndarray,
    indices: np.ndarray,
) -> TrainingBatch:
    """Return the conversion of a batch.

    generator: reused for all batches. Only one batch at a time may use it.
    """
    together = images.only_shifts_and_flips and len(indices) >= _MIN_TOGETHER
    kind = _ShiftedBatch if together else TrainingBatch
    return kind(images, generator, seed, epochs, indices)

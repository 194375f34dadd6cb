"""Converts the files of a batch to training samples, with random numbers keyed by sample."""

import math

import cv2
import numpy as np

from data.augment.base import SAMPLES, Box, SampleGenerator, box_sides
from data.augment.crop import decoded_box
from data.augment.philox import as_doubles, as_integer, as_integers, first_words
from data.augment.training import TrainingImages
from data.images.decode import center_crop, channels_first, checked_jpeg_header, decode

# Computing the random numbers of fewer samples together takes longer than drawing them one by one.
_MIN_TOGETHER = 50
# Random boxes whose numbers are computed together, and the blocks of numbers that they need.
_BOXES, _BLOCKS = 3, 2


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
        self._seed, self._epochs, self._indices = seed, epochs, indices
        self._prepare()

    def _prepare(self) -> None:
        """Compute what all rows share."""

    def decode(self, row: int, data: bytes) -> np.ndarray:
        """Return the decoded crop, uint8 [size, size, C]."""
        key = self._seed, int(self._epochs[row]), int(self._indices[row])
        return self._images.decoded(data, self._generator.at(*key))

    def augment(self, row: int, decoded: np.ndarray) -> np.ndarray:
        """Return uint8 [C, size, size], a view of an array [size, size, C], which the next call may
        overwrite.
        """
        return self._images.augmented(decoded, self._generator.last)


class _ShiftedBatch(TrainingBatch):
    """Like `TrainingBatch`, for shifted images that are only flipped, with the same results.

    For small images, drawing the random numbers one by one takes a sixth of the time of decoding,
    so they are computed together.
    """

    def _prepare(self) -> None:
        images = self._images
        self._config, self._pad = images.config, images.augment.pad
        starts, uniform = shifts_and_flips(
            self._generator, self._seed, self._epochs, self._indices, self._pad
        )
        is_flipped = uniform < images.augment.flip.root
        # In a mirrored image, columns are counted from the other side.
        starts[1, is_flipped] = 2 * self._pad - starts[1, is_flipped]
        self._tops, self._lefts = starts.tolist()
        self._flipped = is_flipped.tolist()
        size, self._channels = images.config.size, images.config.channels
        # The shape of images that `center_crop` returns unchanged.
        self._exact = (size, size, self._channels) if images.config.resize in (None, size) else ()
        # One padded image, which all rows reuse, and its planes, upright and mirrored.
        side, inner = size + 2 * self._pad, slice(self._pad, self._pad + size)
        padded = np.full((side, side, self._channels), images.fill, np.uint8)
        self._inside, planes = padded[inner, inner], padded.transpose(2, 0, 1)
        self._planes = planes, planes[:, :, ::-1]

    def decode(self, row: int, data: bytes) -> np.ndarray:
        image = decode(data, self._channels)
        return image if image.shape == self._exact else center_crop(image, self._config)

    def augment(self, row: int, decoded: np.ndarray) -> np.ndarray:
        self._inside[:] = decoded
        top, left, size = self._tops[row], self._lefts[row], len(decoded)
        return self._planes[self._flipped[row]][:, top : top + size, left : left + size]


class _CroppedBatch(TrainingBatch):
    """Like `TrainingBatch`, for random crops that are only flipped, with the same results.

    The numbers of the first `_BOXES` boxes of all samples are computed together, which takes less
    time, and the first box that fits is used. If none fits, the generator draws all numbers.
    """

    def _prepare(self) -> None:
        augment = self._images.augment
        assert augment.crop_area is not None
        key = self._seed, SAMPLES
        words = first_words(key, self._epochs, self._indices, blocks=_BLOCKS)
        numbers = as_doubles(words)
        # Each box uses two words, and the one that fits uses two more: for its position and for the
        # flip.
        low, high = augment.crop_area
        self._areas = (low + (high - low) * numbers[0 : 2 * _BOXES : 2]).tolist()
        low, high = map(math.log, augment.crop_ratio)
        self._log_ratios = (low + (high - low) * numbers[1 : 2 * _BOXES : 2]).tolist()
        self._starts = words[2::2].tolist()
        self._flipped = (numbers[3::2] < augment.flip.root).tolist()
        self._is_flipped: bool | None = None  # of the last image; None if the generator draws it

    def decode(self, row: int, data: bytes) -> np.ndarray:
        header, box = checked_jpeg_header(data), None
        if header is not None and header.upright:
            box, self._is_flipped = self.box(row, header.height, header.width)
        if header is None or box is None:
            self._is_flipped = None
            return super().decode(row, data)
        return decoded_box(data, header, box, self._images.config)

    def augment(self, row: int, decoded: np.ndarray) -> np.ndarray:
        if self._is_flipped is None:
            return super().augment(row, decoded)
        drawn = decoded[:, :, 0] if decoded.shape[2] == 1 else decoded
        return channels_first(cv2.flip(drawn, 1) if self._is_flipped else drawn)

    def box(self, row: int, height: int, width: int) -> tuple[Box | None, bool | None]:
        """Return the box of `random_box` and whether the image is flipped, or None if the generator
        has to draw them."""
        for i in range(_BOXES):
            sides = box_sides(height, width, self._areas[i][row], self._log_ratios[i][row])
            if sides is not None:
                word, ends = self._starts[i][row], (height - sides[0] + 1, width - sides[1] + 1)
                top, left = as_integer(word & 0xFFFFFFFF, ends[0]), as_integer(word >> 32, ends[1])
                if top is None or left is None:
                    break
                return (top, left, *sides), self._flipped[i][row]
        return None, None


def shifts_and_flips(
    generator: SampleGenerator, seed: int, epochs: np.ndarray, indices: np.ndarray, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and column of each shifted image after padding, int64 [2, n], and the
    number that decides whether it is flipped, float64 [n].
    """
    words = first_words((seed, SAMPLES), epochs, indices)
    # `integers` uses half a word for each number.
    starts, valid = as_integers(words[0], 2 * pad + 1)
    uniform = as_doubles(words[1 if pad else 0])
    for row in np.flatnonzero(~valid).tolist():
        rng = generator.at(seed, int(epochs[row]), int(indices[row]))
        starts[:, row], uniform[row] = rng.integers(2 * pad + 1, size=2), rng.random()
    return starts, uniform


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
    kind = TrainingBatch
    if images.only_flips and len(indices) >= _MIN_TOGETHER:
        kind = _ShiftedBatch if images.augment.crop_area is None else _CroppedBatch
    return kind(images, generator, seed, epochs, indices)

"""Random numbers that are computed for a whole batch equal those of each sample's generator."""

import cv2
import numpy as np
import pytest

from data.augment.base import SAMPLES, SampleGenerator
from data.augment.philox import as_doubles, as_integers, first_words
from data.augment.training import AugmentConfig, TrainingImages
from data.augment.training_batch import shifts_and_flips, training_batch
from data.images.config import ImageConfig
from data.images.decode import contiguous


def image_file(height: int, width: int, channels: int, kind: str = ".png") -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return cv2.imencode(kind, noise)[1].tobytes()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
def test_the_first_words_of_all_samples_are_those_of_their_generators(seed: int) -> None:
    epochs, indices = np.random.default_rng(0).integers(0, 2**40, (2, 60))
    words, generator = first_words((seed, SAMPLES), epochs, indices, blocks=3), SampleGenerator()
    for row, key in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
        raw = generator.at(seed, *key).bit_generator.random_raw(12)
        assert words[:, row].tolist() == raw.tolist()


def test_words_become_the_same_numbers_as_in_a_generator() -> None:
    # With this end, the generator may reject a quarter of the half words.
    end, zeros, indices = 2**30 + 1, np.zeros(400, np.int64), np.arange(400)
    words, generator = first_words((3, SAMPLES), zeros, indices), SampleGenerator()
    integers, valid = as_integers(words[0], end)
    doubles = as_doubles(words[1])
    assert 100 < np.count_nonzero(valid) < 300
    for row in np.flatnonzero(valid).tolist():
        rng = generator.at(3, 0, row)
        assert integers[:, row].tolist() == rng.integers(end, size=2).tolist()
        assert doubles[row] == rng.random()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (32, {"crop_area": None, "pad": 4}),
        (32, {"crop_area": None, "flip": 0.3}),
        (64, {"crop_area": None, "pad": 2, "flip": 1}),
        (32, {"crop_area": None, "pad": 4, "erase": 0.5}),
        (32, {}),
        (64, {"crop_area": (0.9, 1.0), "flip": 0.3}),
        (32, {"erase": 0.5}),
    ],
)
def test_a_batch_has_the_pixels_of_its_samples(size: int, settings: dict, channels: int) -> None:
    mean = (0.2, 0.5, 0.7)[:channels]
    image = ImageConfig(size=size, channels=channels, mean=mean, std=mean)
    augment = AugmentConfig.model_validate(settings)
    epochs, indices = np.arange(100) // 30, np.arange(100)
    batch = training_batch(TrainingImages(image, augment), SampleGenerator(), 5, epochs, indices)
    files = [image_file(size, size, channels), image_file(size + 9, size, channels, ".jpg")]
    generator, one_by_one = SampleGenerator(), TrainingImages(image, augment)
    for row in range(100):
        data = files[row % 2]
        batch.decode(row, files[0])  # the first attempt, if a sample is replaced
        found = batch.augment(row, batch.decode(row, data))
        rng = generator.at(5, int(epochs[row]), row)
        expected = one_by_one.augmented(one_by_one.decoded(data, rng), rng)
        assert np.array_equal(contiguous(found), contiguous(expected))


def test_the_boxes_and_flips_of_a_batch_are_those_of_its_generators() -> None:
    image, augment = ImageConfig(size=32), AugmentConfig(crop_area=(0.1, 0.6), flip=0.5)
    zeros, indices, generator = np.zeros(400, np.int64), np.arange(400), SampleGenerator()
    batch = training_batch(TrainingImages(image, augment), generator, 3, zeros, indices)
    # With these sides, many boxes do not fit, and some are as high as the image.
    drawn = [batch.box(row, 20, 60) for row in range(400)]
    assert 10 < drawn.count((None, None)) < 200
    for row, (box, is_flipped) in enumerate(drawn):
        rng = generator.at(3, 0, row)
        expected = augment.box(20, 60, rng), bool(rng.random() < 0.5)
        assert (box, is_flipped) in ((None, None), expected)


def test_numbers_that_a_generator_draws_again_are_drawn_again() -> None:
    # Of 1,000,000 samples, these are the ones whose generator rejects a number with this `pad`.
    pad, indices = 4034, np.array([170_478, 330_212, 888_421])
    epochs, generator = np.zeros_like(indices), SampleGenerator()
    assert not as_integers(first_words((0, SAMPLES), epochs, indices)[0], 2 * pad + 1)[1].any()
    starts, uniform = shifts_and_flips(generator, 0, epochs, indices, pad)
    for row, index in enumerate(indices.tolist()):
        rng = generator.at(0, 0, index)
        assert starts[:, row].tolist() == rng.integers(2 * pad + 1, size=2).tolist()
        assert uniform[row] == rng.random()

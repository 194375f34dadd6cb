"""The random numbers of augmentation are those of numpy's Philox generator."""

import numpy as np
import pytest

from data.augment.base import SAMPLES, Draws

ENDS = (1, 2, 3, 9, 14, 300, 2**31 + 5, 2**32 - 2)


def numpy_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    counter = np.array([0, index, epoch, 0], np.uint64)
    key = np.array([seed, SAMPLES], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 3])
def test_every_number_equals_that_of_numpy(seed: int) -> None:
    choice, draws = np.random.default_rng(seed), Draws()
    for index in range(200):
        key = seed, int(choice.integers(9)), index * 10**7
        expected = numpy_generator(*key)
        draws.at(*key)
        for _ in range(choice.integers(40)):
            match choice.integers(4):
                case 0:
                    assert draws.random() == expected.random()
                case 1:
                    assert draws.uniform(-0.3, 2.0) == expected.uniform(-0.3, 2.0)
                case 2:
                    end = int(choice.choice(ENDS))
                    assert draws.integers(end) == expected.integers(end)
                case 3:
                    assert draws.permutation(4) == expected.permutation(4).tolist()
        # A user-defined augmentation continues with numpy's generator.
        rest = draws.generator()
        for generator in (rest, expected):
            generator.integers(7)
        assert rest.beta(0.2, 0.2) == expected.beta(0.2, 0.2)
        assert rest.random() == expected.random()

"""The options of losses, their bounds, and the class information that each loss needs."""

import math

import pytest
import torch

from heads import ClassHead
from heads.losses import LOSSES, ClassFacts, HierarchicalSoftmax, NoiseContrastiveEstimation


def test_noise_is_proportional_to_the_class_counts_and_positive():
    counts = torch.tensor([3.0, 0.0, 1.5])
    q = NoiseContrastiveEstimation().prepare(ClassFacts(3, counts)).q
    torch.testing.assert_close(q, torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64))
    uniform = NoiseContrastiveEstimation(noise="uniform").prepare(ClassFacts(3, counts)).q
    torch.testing.assert_close(uniform, torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "facts", "message"),
    [
        ("nce", ClassFacts(3), "pass class_counts, or set noise=uniform"),
        ("nce", ClassFacts(3, torch.ones(4)), r"shape \[4\], but there are 3 classes"),
        ("nce", ClassFacts(2, torch.tensor([-1.0, 2.0])), "finite numbers of at least 0"),
        ("nce", ClassFacts(2, torch.tensor([math.nan, 2.0])), "finite numbers of at least 0"),
        ("simloss", ClassFacts(3), "needs label vectors"),
        ("simloss", ClassFacts(3, None, torch.ones(2, 5)), r"shape \[2, 5\], but there are 3"),
        ("simloss", ClassFacts(1, None, torch.tensor([[math.nan]])), "class 0 is not finite"),
    ],
)
def test_missing_or_invalid_facts_for_a_loss_raise_an_error(loss, facts, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[loss]().prepare(facts)


def test_hierarchical_softmax_without_its_head_raises_an_error():
    with pytest.raises(ValueError, match="use HierarchicalSoftmaxHead"):
        ClassHead(3, 4, HierarchicalSoftmax())


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.int64, 1), (torch.float16, 1), (torch.float32, 1e30), (torch.float32, 1e-30)],
)
def test_label_vectors_of_any_dtype_and_length_are_scaled_to_length_1(dtype, scale):
    vectors = (torch.tensor([[3, 4], [0, 0]]) * scale).to(dtype)
    unit = LOSSES["simloss"]().prepare(ClassFacts(2, None, vectors)).vectors
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))

"""The squared norm of gradients, in the precision of the gradients."""

import pytest
import torch
from torch import nn

from heads import ClassHead, CrossEntropy
from heads.gradients import squared_norm
from trainer.strategies import Strategy

CPU = torch.device("cpu")


def test_a_float64_gradient_is_squared_in_float64():
    """In float32, the squares would overflow."""
    head = ClassHead(3, 4, CrossEntropy(), dtype=torch.float64)
    for parameter in head.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    assert float(head.squared_gradient_norm()) == pytest.approx(16e60, rel=1e-12)
    backbone = nn.Linear(3, 5, bias=False, dtype=torch.float64)
    backbone.weight.grad = torch.full_like(backbone.weight, 1e30)
    norm = Strategy(backbone).squared_gradient_norm()  # type: ignore[arg-type]
    assert float(norm) == pytest.approx(15e60, rel=1e-12)


def test_the_norm_of_a_large_gradient_has_float32_accuracy():
    gradient = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    expected = float(gradient.double().square().sum())
    assert float(squared_norm([gradient], CPU)) == pytest.approx(expected, rel=1e-6)


def test_norms_have_the_same_dtype_on_every_rank():
    """All ranks sum their norms, including ranks without gradients or with gradients of another
    dtype."""
    gradients = [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for tensors in ([], [torch.empty(0)], gradients, [torch.tensor(2.0)], [torch.ones(2).double()]):
        norm = squared_norm(tensors, CPU)
        assert norm.dtype == torch.float64
        assert norm.shape == ()
        expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
        assert float(norm) == pytest.approx(expected, rel=1e-6)

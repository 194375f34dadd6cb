"""Batch norm on several ranks matches batch norm in one process on the full batch."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on_ranks
from trainer.backbone.batch_norm import FrozenBatchNorm2d, apply_batch_norm_mode

CPU = torch.device("cpu")


def full_batch():
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(7, 4, 5, 5, generator=generator, dtype=torch.float64)
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x, upstream


def batch_norm() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
    return layer


def run(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, np.ndarray]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * upstream).sum().backward()
    return {
        "output": y.detach().numpy(),
        "by_input": x.grad.numpy(),
        "by_weight": layer.weight.grad.numpy(),
        "by_bias": layer.bias.grad.numpy(),
        "mean": layer.running_mean.numpy(),
        "variance": layer.running_var.numpy(),
    }


def on_rank(edges: list[int]) -> dict[str, np.ndarray]:
    layer = batch_norm()
    model = nn.Sequential(layer)
    apply_batch_norm_mode(model, "sync", dist.group.WORLD, CPU)
    rank = dist.get_rank()
    part = slice(edges[rank], edges[rank + 1])
    x, upstream = full_batch()
    return run(layer, x[part], upstream[part])


@pytest.mark.parametrize("edges", [[0, 3, 7], [0, 0, 5, 7], [0, 2, 4, 6, 7]], ids=str)
def test_synchronized_batch_norm_equals_the_full_batch(edges):
    """The shares are uneven, and one rank has no rows."""
    ranks = run_on_ranks(len(edges) - 1, on_rank, edges)
    expected = run(batch_norm(), *full_batch())
    exact = {"rtol": 1e-11, "atol": 1e-11}
    for name in ("output", "by_input"):
        joined = np.concatenate([result[name] for result in ranks])
        np.testing.assert_allclose(joined, expected[name], **exact)
    for name in ("by_weight", "by_bias"):  # each rank's own part: the strategy sums them
        summed = sum(result[name] for result in ranks)
        np.testing.assert_allclose(summed, expected[name], **exact)
    for result in ranks:
        for name in ("mean", "variance"):
            np.testing.assert_allclose(result[name], expected[name], **exact)


def test_frozen_batch_norm_trains_its_scale_but_not_its_statistics():
    model = nn.Sequential(batch_norm())
    apply_batch_norm_mode(model, "frozen", None, CPU)
    model.train()
    x, upstream = full_batch()
    result = run(model[0], x, upstream)
    assert isinstance(model[0], FrozenBatchNorm2d)
    assert (result["mean"] == 0).all()
    assert (result["variance"] == 1).all()
    assert np.abs(result["by_weight"]).min() > 0


def test_local_batch_norm_uses_the_torch_module():
    model = nn.Sequential(batch_norm())
    apply_batch_norm_mode(model, "local", None, CPU)
    assert type(model[0]) is nn.BatchNorm2d

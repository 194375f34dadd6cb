"""Batch norm on several ranks matches batch norm in one process on the full batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.host_reads import host_reads
from tests.ranks import run_on_ranks
from trainer.backbone.batch_norm import FrozenBatchNorm, GroupBatchNorm, apply_batch_norm_mode


def frozen_scale() -> nn.Module:
    layer = nn.BatchNorm2d(4, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2d": (lambda: nn.BatchNorm2d(4, dtype=torch.float64), (7, 4, 5, 5)),
    "1d": (lambda: nn.BatchNorm1d(4, dtype=torch.float64), (7, 4)),
    "3d": (lambda: nn.BatchNorm3d(4, dtype=torch.float64), (7, 4, 2, 3, 2)),
    "without scale": (lambda: nn.BatchNorm2d(4, affine=False, dtype=torch.float64), (7, 4, 3, 3)),
    "without bias": (lambda: nn.BatchNorm2d(4, bias=False, dtype=torch.float64), (7, 4, 3, 3)),
    "frozen scale": (frozen_scale, (7, 4, 3, 3)),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None, dtype=torch.float64), (7, 4, 3, 3)),
}


def full_batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(shape, generator=generator, dtype=torch.float64)


def batch_norm(kind: str) -> nn.Module:
    layer = LAYERS[kind][0]()
    for values, parameter in zip(
        ([1.0, 2.0, -1.0, 0.5], [0.0, 1.0, -1.0, 2.0]), layer.parameters(), strict=False
    ):
        parameter.data = torch.tensor(values, dtype=torch.float64)
    return layer


def run(layer: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, np.ndarray]:
    for _ in range(2):  # the second pass updates running statistics that are not the initial ones
        x = x.detach().clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y * upstream).sum().backward()
    found = {"output": y, "by_input": x.grad, **dict(layer.named_buffers())}
    trained = [(name, p) for name, p in layer.named_parameters() if p.requires_grad]
    found |= {f"by_{name}": parameter.grad for name, parameter in trained}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def on_rank(edges: list[int]) -> dict[str, dict[str, np.ndarray]]:
    rank, found = dist.get_rank(), {}
    part = slice(edges[rank], edges[rank + 1])
    for kind, (_, shape) in LAYERS.items():
        model = nn.Sequential(batch_norm(kind))
        apply_batch_norm_mode(model, "sync", dist.group.WORLD)
        assert type(model[0]) is GroupBatchNorm
        with host_reads() as reads:
            x, upstream = full_batch(shape)
            layer = model[0]
            mine = x[part].requires_grad_()
            layer(mine).backward(upstream[part])
        assert not reads, (kind, reads)
        layer.reset_running_stats()
        found[kind] = run(layer, x[part].detach(), upstream[part])
    return found


@pytest.mark.parametrize("edges", [[0, 0, 5, 7], [0, 2, 4, 6, 7]], ids=str)
def test_synchronized_batch_norm_equals_the_full_batch_and_does_not_wait(edges: list[int]) -> None:
    """The shares are uneven, and in one case the first rank has no rows."""
    ranks = run_on_ranks(len(edges) - 1, on_rank, edges)
    for kind, (_, shape) in LAYERS.items():
        expected = run(batch_norm(kind), *full_batch(shape))
        results = [rank[kind] for rank in ranks]
        for name, value in expected.items():
            found = [result[name] for result in results]
            if name in ("output", "by_input"):
                found = [np.concatenate(found)]
            elif name.startswith("by_"):  # the part of each rank; the strategy sums the parts
                found = [sum(found)]
            for each in found:
                np.testing.assert_allclose(
                    each, value, rtol=1e-11, atol=1e-11, err_msg=f"{kind} {name}"
                )


def test_frozen_batch_norm_trains_its_scale_but_not_its_statistics() -> None:
    model = nn.Sequential(batch_norm("2d"))
    apply_batch_norm_mode(model, "frozen", None)
    model.train()
    result = run(model[0], *full_batch(LAYERS["2d"][1]))
    assert isinstance(model[0], FrozenBatchNorm)
    assert (result["running_mean"] == 0).all()
    assert (result["running_var"] == 1).all()
    assert np.abs(result["by_weight"]).min() > 0

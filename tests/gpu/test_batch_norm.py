"""Synchronized batch norm on CUDA: torch's kernels give the results of batch norm in float64, and
the host does not wait.

The group has a single rank, so that one device suffices. `tests/trainer/test_batch_norm.py` tests
the merging of several ranks on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.backbone.batch_norm import apply_batch_norm_mode

_CHANNELS = 8
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@contextmanager
def group_of_one(device: torch.device) -> Iterator[ProcessGroup | None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer(dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm2d(_CHANNELS, dtype=dtype, device=device))
    for parameter in model.parameters():
        parameter.data = torch.linspace(-1, 2, _CHANNELS, dtype=dtype, device=device)
    return model


def passes(model: nn.Sequential, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(upstream)
    assert x.grad is not None
    found = {"output": y.detach(), "by_input": x.grad, **dict(model.named_buffers())}
    return found | {f"by_{name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", _TOLERANCES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_synchronized_batch_norm_equals_batch_norm_in_float64(
    dtype: torch.dtype, channels_last: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, upstream = (
        torch.randn(16, _CHANNELS, 7, 5, generator=generator).to(dtype) + offset
        for offset in (3, 0)
    )
    expected = passes(layer(torch.float64, torch.device("cpu")), x.double(), upstream.double())
    layout = torch.channels_last if channels_last else torch.contiguous_format
    mine = [each.to(device, memory_format=layout) for each in (x, upstream)]
    with group_of_one(device) as group:
        model = layer(torch.float32, device)
        apply_batch_norm_mode(model, "sync", group)
        passes(layer(torch.float32, device), *mine)  # loads the kernels, which may wait
        passes(model, *mine)
        model[0].reset_running_stats()
        model.zero_grad()
        with waiting_is_an_error(device):
            found = passes(model, *mine)
    assert found["output"].dtype == found["by_input"].dtype == dtype
    assert found["output"].is_contiguous(memory_format=layout)
    assert found["by_input"].is_contiguous(memory_format=layout)
    tolerance = _TOLERANCES[dtype]
    for name, value in expected.items():
        # Sums over all rows have larger values than single elements.
        atol = tolerance * float(value.double().abs().amax())
        torch.testing.assert_close(
            found[name].cpu().double(), value.double(), rtol=tolerance, atol=atol
        )

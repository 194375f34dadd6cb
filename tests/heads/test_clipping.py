"""The head in a training loop of one's own: summed and clipped gradients."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from heads import (
    BatchCrossEntropy,
    ClassHead,
    Dot,
    FusedSGD,
    clip_grad_norm_,
    sum_gradients,
    sum_sharded_gradients,
)
from tests.heads.cases import sgd, share
from tests.ranks import rank_mesh, run_on_ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU())


def wrapped_network(wrap: str) -> nn.Module:
    backbone = network()
    if wrap == "ddp":
        backbone = DistributedDataParallel(backbone)
        backbone.register_comm_hook(None, sum_gradients)
    elif wrap == "fsdp":
        fully_shard(backbone)
        sum_sharded_gradients(backbone)
    return backbone


def full_array(gradient: torch.Tensor) -> np.ndarray:
    found = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found.numpy().copy()


def clipped_steps(wrap: str, data_axis: int, fuses: bool):
    """The norms of three clipped steps, the backbone and this rank's rows after them, and the
    classes of these rows."""
    mesh, mine = (rank_mesh(data_axis), share(32)) if wrap else (None, slice(None))
    backbone = wrapped_network(wrap)
    inputs, labels = torch.randn(32, 20), torch.randint(50, (32,))
    logits = Dot(learn_scale=True)
    head = ClassHead(64, 50, BatchCrossEntropy(), logits=logits, mesh=mesh, init_std=0.3)
    of_head = FusedSGD(head, lr=0.5, deferred=True) if fuses else sgd(head, 0.5)
    of_backbone = SGD(backbone.parameters(), lr=0.5)
    norms = []
    for _ in range(3):
        head(backbone(inputs[mine]), labels[mine]).backward()
        parameters = [*backbone.parameters(), *head.parameters()]
        if wrap:
            norms.append(clip_grad_norm_(parameters, head, 0.5).item())
        else:
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.5).item())
        for optimizer in (of_backbone, of_head):
            optimizer.step()
            optimizer.zero_grad()
    held = slice(head.engine.weights.start, head.engine.weights.stop)
    weights = [full_array(parameter.detach()) for parameter in backbone.parameters()]
    return norms, weights, head.weight.detach().numpy(), held


def both_clipped_steps(wrap: str, data_axis: int):
    return [clipped_steps(wrap, data_axis, fuses) for fuses in (False, True)]


@pytest.mark.parametrize(
    ("wrap", "world_size", "data_axis"), [("ddp", 2, 1), ("ddp", 4, 2), ("fsdp", 2, 1)]
)
def test_clipping_on_ranks_equals_torch_s_clipping_in_one_process(wrap, world_size, data_axis):
    norms, weights, rows, _ = clipped_steps("", 1, False)
    assert min(norms) > 0.5
    ranks = run_on_ranks(world_size, both_clipped_steps, wrap, data_axis)
    for rank in ranks:
        for (found_norms, found_weights, found_rows, held), first in zip(
            rank, ranks[0], strict=True
        ):
            assert found_norms == first[0]
            np.testing.assert_allclose(found_norms, norms, rtol=1e-5)
            np.testing.assert_allclose(found_rows, rows[held], rtol=1e-5, atol=1e-6)
            for one, other in zip(found_weights, weights, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"deferred": True, "needs_norm": False}])
def test_rows_without_a_norm_before_the_step_cannot_be_clipped(options):
    head, backbone = ClassHead(64, 50, BatchCrossEntropy()), network()
    FusedSGD(head, lr=0.1, **options)
    head(backbone(torch.randn(4, 20)), torch.randint(50, (4,))).backward()
    with pytest.raises(RuntimeError, match="cannot clip"):
        clip_grad_norm_(backbone.parameters(), head, 1.0)


def test_several_heads_are_clipped_by_one_norm():
    heads, backbone = [ClassHead(64, 50, BatchCrossEntropy()) for _ in range(2)], network()
    features, labels = backbone(torch.randn(8, 20)), torch.randint(50, (8,))
    sum(head(features, labels) for head in heads).backward()
    parameters = [p for module in (backbone, *heads) for p in module.parameters()]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    norm = clip_grad_norm_(backbone.parameters(), heads, 0.01)
    torch.testing.assert_close(norm.float(), total)
    left = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.testing.assert_close(left, torch.tensor(0.01))

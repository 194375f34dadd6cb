"""Deferred steps on a CUDA device do not synchronize, and synchronized batch norm trains ResNet-50.

tests/trainer/test_deferred.py compares deferred with synchronous steps.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.gpu.tasks import IMAGES, TaskSize, random_batch
from data.loading.batch import Batch
from heads.engine.agreement import non_finite_rows
from serving.addresses import free_port
from tests.gpu.tasks import TINY, task_of, trace_steps
from tests.gpu.test_training import WORLD_SIZE, one_rank, opened_world
from tests.ranks import run_on_ranks
from trainer.step import Gradients, PartLoss, StepNumbers, read_numbers, take_step
from trainer.task import Task
from trainer.world import World

Changes = dict[str, dict[str, Any]]

LOSSES = ("ce", "batch_ce", "nce")


def make_task(
    changes: Changes, device: torch.device, world: World | None = None, *, synchronous: bool = False
) -> Task:
    train = {**changes.get("train", {}), "synchronous": synchronous}
    optimizer = changes.get("optimizer", {"kind": "sgd", "lr": 0.05})
    kind = {"train": {"precision": "fp32"}}
    changes = {**changes, "train": train, "optimizer": optimizer}
    return task_of(kind, TINY, device, changes, world)


# ------------------------------------------------------------------------ synchronizations


def sites_of_steps(device: str) -> dict[str, Counter[str]]:
    world = one_rank(device)
    found = {}
    for strategy in ("ddp", "fsdp"):
        for loss in LOSSES:
            changes = {
                "train": {"strategy": {"kind": strategy}, "clip_norm": 1.0},
                "head": {"loss": {"kind": loss}},
                "backbone": {"batch_norm": "local"},
            }
            task = make_task(changes, world.device, world)
            assert task.defers
            found[f"{strategy} {loss}"] = trace_steps(task, 2).synchronizations()
            task.close()
    return found


def test_no_step_under_ddp_or_fsdp_synchronizes_with_the_host(device):
    (found,) = run_on_ranks(1, sites_of_steps, device.type)
    assert len(found) == 2 * len(LOSSES)
    assert {case: sites for case, sites in found.items() if sites} == {}


def test_the_trace_of_a_synchronous_step_shows_where_it_synchronizes(device):
    """Otherwise, the test above could not fail."""
    sites = trace_steps(make_task({}, device, synchronous=True), 2).synchronizations()
    assert any("trainer/step.py" in site and "values" in site for site in sites), sites


@pytest.mark.gpu
def test_a_host_that_waits_for_a_step_checks_for_lost_ranks(cuda):
    def check() -> None:
        raise ConnectionError

    scalar = torch.ones((), dtype=torch.float64, device=cuda)
    part = PartLoss(scalar, 2, non_finite_rows(torch.ones(2, 3, device=cuda)))
    StepNumbers(1, Gradients(scalar, [part]), scalar)  # allocates pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    numbers = StepNumbers(1, Gradients(scalar, [part]), scalar)
    with pytest.raises(ConnectionError):
        numbers.wait(check)
    torch.cuda.synchronize()
    numbers.wait(check)
    assert numbers.values[:3] == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------------ batch norm

BOTTLENECKS = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "bottleneck",
}
# transformers' default configuration is ResNet-50. CPUs train a small network with the same layers.
ENCODERS: dict[str, dict[str, Any]] = {"cuda": {"model_type": "resnet"}, "cpu": BOTTLENECKS}


def resnet_losses(device: str, world: World | None = None) -> list[float]:
    """Return the losses of three steps with synchronized batch norm, in which the ranks share 12
    images."""
    size = TaskSize(ENCODERS[device], classes=13, batch=12, side=64)
    changes: Changes = {
        "train": {"precision": "fp32"},
        "backbone": {"batch_norm": "sync"},
        "head": {"init_std": 1.0},  # otherwise the loss hardly depends on the features
    }
    place = torch.device(device) if world is None else world.device
    task = task_of(IMAGES, size, place, changes, world)
    layers = [part for part in task.backbone.modules() if isinstance(part, _BatchNorm)]
    assert all((type(layer) is nn.BatchNorm2d) is (world is None) for layer in layers)
    batch = from_dark_to_bright(random_batch(task.recipe, 13, place))
    if world is not None:
        batch = share(batch, world)
    losses = []
    with torch.backends.cudnn.flags(allow_tf32=False):
        for step in (1, 2, 3):
            losses.append(read_numbers(task, take_step(task, batch, 0.1, step=step)).loss)
    task.close()
    return losses


def from_dark_to_bright(batch: Batch) -> Batch:
    """Return the images, increasingly bright, so that the statistics of the ranks differ."""
    pixels = batch.inputs["pixel_values"]
    factors = torch.linspace(0.05, 1, len(pixels), device=pixels.device).view(-1, 1, 1, 1)
    return replace(batch, inputs={"pixel_values": (pixels * factors).to(torch.uint8)})


def share(batch: Batch, world: World) -> Batch:
    rows = len(batch.labels)
    own = slice(rows * world.rank // world.size, rows * (world.rank + 1) // world.size)
    return replace(batch.each(lambda tensor: tensor[own]), cursor=None)


def resnet_on_two_ranks(device: str, port: int) -> list[float]:
    return resnet_losses(device, opened_world(device, port))


def test_resnet_50_with_synchronized_batch_norm_trains_on_two_devices_as_on_one(two):
    expected = resnet_losses(two)
    for found in run_on_ranks(WORLD_SIZE, resnet_on_two_ranks, two, free_port("127.0.0.1", 0)):
        assert found == pytest.approx(expected, rel=1e-2)

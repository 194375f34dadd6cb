"""Training on CUDA devices: a task, its checkpoints, and ranks with NCCL."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from heads import ClassHead
from serving.addresses import free_port
from tests.gpu.world import world_of_one_rank
from tests.heads.cases import (
    LOSS_KINDS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_loss_and_gradients,
    problem,
    set_nodes,
)
from tests.ranks import run_on_ranks
from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import full_entries, started, take_steps
from trainer.checkpoints import find_checkpoint, restore_random_state
from trainer.checkpoints.entries import training_entries
from trainer.world import World, open_world

WORLD_SIZE = 2


def one_process(device: torch.device) -> World:
    return World(0, 1, 0, 1, device, None)


def trained(shards: Path, world: World, changes: dict) -> dict:
    """The losses of three steps with momentum and gradient clipping, and the resulting tensors."""
    task = started(shards, world=world, train__global_batch=12, **changes)
    # Convolutions would use TensorFloat-32 otherwise.
    with torch.backends.cudnn.flags(allow_tf32=False):
        losses = take_steps(task, 3)
    assert {tensor.device.type for tensor in training_entries(task).values()} == {world.device.type}
    found = {"loss": np.array(losses), **full_entries(task)}
    task.strategy.close()
    return found


def check(got: dict, expected: dict, *, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)


CHANGES = [
    {},
    {"head__loss__kind": "batch_ce", "head__weights__kind": "vtree", "train__micro_batches": 3},
    {"head__loss__kind": "nce", "head__loss__samples": 5, "head__weights__kind": "utree"},
    {"head__loss__kind": "simloss", "head__class_weights": "balanced"},
    {"head__loss__kind": "hierarchical_softmax", "head__weights__kind": "vtree"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes.get("head__loss__kind"))
def test_a_task_trains_as_it_does_on_the_cpu(device, glyphs, changes):
    expected = trained(glyphs, one_process(torch.device("cpu")), changes)
    check(trained(glyphs, one_process(device), changes), expected)


def draws(device: torch.device) -> list[list[float]]:
    return [torch.rand(3, device=kind).tolist() for kind in ("cpu", device)]


def test_a_checkpoint_from_the_cpu_restores_its_generator_and_seeds_the_device(device, tmp_path):
    cpu = one_process(torch.device("cpu"))
    save_checkpoint(tmp_path, {"weight": torch.zeros(1)}, {"step": 1}, cpu, keep=1)
    continued = torch.rand(3).tolist()
    checkpoint, _ = find_checkpoint(tmp_path, cpu)
    assert checkpoint is not None
    found = []
    for _ in range(2):
        restore_random_state(checkpoint, one_process(device), seed=0)
        found.append(draws(device))
    assert found[0] == found[1]
    assert found[0][0] == continued


def one_rank(device: str) -> World:
    """Replace the world of tests/ranks.py with one in which every collective is called."""
    dist.destroy_process_group()
    context = world_of_one_rank(torch.device(device))
    _OPEN.append(context)
    return context.__enter__()


def opened_world(device: str, port: int) -> World:
    """Replace the world of tests/ranks.py with one from a launcher's environment variables."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(WORLD_SIZE)
    )
    context = open_world(device)
    _OPEN.append(context)
    return context.__enter__()


_OPEN: list = []  # never closed, because the parent terminates the process


def all_heads(device: str, port: int, data_axis: int) -> dict:
    world = opened_world(device, port)
    mesh = init_device_mesh(
        device, (data_axis, WORLD_SIZE // data_axis), mesh_dim_names=("data", "class")
    )
    return results_of_heads(world, mesh)


def results_of_heads(world: World, mesh: DeviceMesh) -> dict:
    """For each loss on a mesh over the ranks: the value, the gradients and the range of nodes."""
    found = {}
    begin, end = 11 * world.rank // world.size, 11 * (world.rank + 1) // world.size
    for kind in LOSS_KINDS:
        tree, loss = label_tree("vtree", 13), make_loss(kind, 13)
        head = ClassHead(5, tree, loss, mesh=mesh, device=world.device, dtype=torch.float64)
        features, labels, nodes = problem(tree, num_rows=11, dim=5)
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        set_nodes(head, nodes)
        mine = features[begin:end].to(world.device).requires_grad_()
        value = head(mine, labels[begin:end].to(world.device))
        value.backward()
        grads = mine.grad.cpu().numpy(), gradient_of_nodes(head).cpu().numpy()
        found[kind] = value.item(), *grads, held
    return found


@pytest.mark.parametrize("data_axis", [1, 2])
def test_heads_sharded_over_two_devices_equal_their_definitions(two, data_axis):
    check_heads(run_on_ranks(WORLD_SIZE, all_heads, two, free_port("127.0.0.1", 0), data_axis))


def check_heads(ranks: list[dict]) -> None:
    for kind in LOSS_KINDS:
        tree = label_tree("vtree", 13)
        loss, *grads = naive_loss_and_gradients(kind, tree, *problem(tree, num_rows=11, dim=5))
        for rank, answers in enumerate(ranks):
            value, by_features, by_nodes, held = answers[kind]
            np.testing.assert_allclose(value, loss, rtol=1e-10, atol=1e-10)
            rows = slice(11 * rank // len(ranks), 11 * (rank + 1) // len(ranks))
            np.testing.assert_allclose(by_features, grads[0][rows], rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(by_nodes, grads[1][held], rtol=1e-10, atol=1e-10)


SHARDED = {"head__loss__kind": "batch_ce", "head__weights__kind": "vtree"}


STRATEGIES: dict[str, list[dict]] = {
    "torch": [{"kind": "ddp"}, {"kind": "fsdp"}, {"kind": "fsdp", "shard_group": 1}],
    "deepspeed": [{"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)],
}


def tasks_on_a_rank(device: str, port: int, shards: Path, library: str) -> list[dict]:
    world = opened_world(device, port)
    changes = [{**SHARDED, "train__strategy": strategy} for strategy in STRATEGIES[library]]
    return [trained(shards, world, change) for change in changes]


@pytest.mark.parametrize("library", STRATEGIES)
def test_with_every_strategy_a_task_trains_on_two_devices_as_on_one(library, two, glyphs):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    expected = trained(glyphs, one_process(torch.device(two)), SHARDED)
    for answers in run_on_ranks(
        WORLD_SIZE, tasks_on_a_rank, two, free_port("127.0.0.1", 0), glyphs, library
    ):
        for answer in answers:
            check(answer, expected)

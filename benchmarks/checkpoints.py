"""Cost of checkpoints during training, on one rank and on two ranks.

The benchmarks measure how long a background save stalls training, relative to a synchronous save,
and how much its writer thread slows down the following steps.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.timing import Row, ratio_row
from trainer.checkpoints import CheckpointWriter
from trainer.config import CheckpointConfig
from trainer.world import World

STATE_BYTES = 200 * 2**20
ROUNDS = 9
_NUM_TENSORS = 40
_NUM_STEPS = 20

Times = dict[str, list[float]]


def rows(world_size: int) -> Iterator[Row]:
    """Measure saves of a state that is half replicated, like DDP's backbone, and half sharded."""
    times = {name: np.array(found) for name, found in _measured(world_size).items()}
    case = f"{STATE_BYTES >> 20} MB, {world_size} rank{'s' * (world_size > 1)}"
    what = "stall of a background save / synchronous save"
    yield ratio_row(what, case, times["stall"], times["sync"], 0.10)
    what = f"background save during {_NUM_STEPS} steps / synchronous save, then the steps"
    yield ratio_row(what, case, times["total"], times["sync"] + times["steps"])
    what = f"{_NUM_STEPS} steps during a background save / without a save"
    yield ratio_row(what, case, times["busy steps"], times["steps"])
    first, sync = times["first"], np.median(times["sync"], keepdims=True)
    yield ratio_row("stall of the first background save / synchronous save", case, first, sync)


def _measured(world_size: int) -> Times:
    context = get_context("spawn")
    with TemporaryDirectory() as folder:  # on the disk of TMPDIR
        pipes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, Path(folder), theirs)
            context.Process(target=_rank, args=arguments, daemon=True).start()
            theirs.close()
            pipes.append(ours)
        answers: list[Times] = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
    return answers[0]


def _rank(rank: int, world_size: int, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    mesh = None
    if world_size > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "class"))
    world = World(
        rank=rank,
        size=world_size,
        local_rank=rank,
        local_size=world_size,
        device=torch.device("cpu"),
        mesh=mesh,
    )
    pipe.send(_times(folder, world))
    pipe.recv()  # wait for all ranks, so that no rank destroys the process group early
    os._exit(0)


def _times(folder: Path, world: World) -> Times:
    entries = _entries(world)
    matrix = torch.randn(512, 512)
    found: Times = {name: [] for name in ("sync", "stall", "total", "steps", "busy steps", "first")}
    clock = partial(_seconds, world)

    def steps() -> None:
        for _ in range(_NUM_STEPS):
            torch.mm(matrix, matrix)
            world.barrier()

    def writer(name: str, *, in_background: bool) -> CheckpointWriter:
        config = CheckpointConfig(keep_last=1, in_background=in_background)
        return CheckpointWriter(folder / name, config, world, start_step=0)

    with (
        writer("sync", in_background=False) as waited,
        writer("background", in_background=True) as background,
    ):
        for number in range(ROUNDS + 1):
            state = {"step": number}
            sync = clock(partial(waited.save, entries, state))
            alone = clock(steps)
            stall = clock(partial(background.save, entries, state))
            busy = clock(steps)
            rest = clock(background.finish)
            if number == 0:  # warm-up; the background save allocates its buffer
                found["first"].append(stall)
                continue
            seconds = (sync, stall, stall + busy + rest, alone, busy)
            for name, value in zip(
                ("sync", "stall", "total", "steps", "busy steps"), seconds, strict=True
            ):
                found[name].append(value)
    return found


def _seconds(world: World, part: Callable[[], object]) -> float:
    """Return how long `part` takes on this rank. All ranks start it at the same time."""
    world.barrier()
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def _entries(world: World) -> dict[str, Tensor]:
    numbers = STATE_BYTES // 4 // _NUM_TENSORS // 1024
    entries: dict[str, Tensor] = {}
    for number in range(_NUM_TENSORS):
        if number % 2 == 0 or world.mesh is None:
            entries[f"backbone.{number}"] = torch.randn(numbers, 1024)
        else:
            share = torch.randn(numbers // world.size, 1024)
            mesh = world.mesh["class"]
            entries[f"head.{number}"] = DTensor.from_local(share, mesh, [Shard(0)])
    return entries

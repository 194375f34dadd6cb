"""Runs a function on several gloo ranks, each in its own process, and returns their results.

The ranks are forked from a server that has already imported torch, so they start quickly.
"""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

_TIMEOUT_SECONDS = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.imported"])
_store: Any = None  # the store of a rank's process group


class RankError(Exception):
    """A rank failed. The message contains its number and its traceback."""


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in a process group of `world_size` ranks; returns the results in order.

    `function` must be importable by name. Results are numpy arrays or plain values, not tensors.
    Raises RankError with the traceback of the first rank that failed. All processes are killed at
    the end.
    """
    with TemporaryDirectory() as folder:
        ranks = [
            _start(rank, world_size, Path(folder), function, args) for rank in range(world_size)
        ]
        try:
            results = [_receive(rank, pipe) for rank, (_, pipe) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join(60)
    return results


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Create a process, not yet started, that runs `function(*args)` with torch already imported.

    `function` must be importable by name. Stop the process before the test ends.
    """
    # Python 3.11 does not pass `sys.path` to the fork server. With `python -P`, the server would
    # not find the modules to preload, and every process would import torch itself.
    with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1])):
        ensure_running()
    return _context.Process(target=function, args=args)


@contextmanager
def running(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Start processes, and kill those that are left at the end."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join(60)


def set_rank(rank: int, world_size: int, port: int) -> None:
    """Set the variables that torchrun sets for a rank. `port` is that of the store on rank 0."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _start(rank: int, world_size: int, folder: Path, function: Any, args: Any) -> Any:
    ours, theirs = _context.Pipe()
    process = forked(_rank_main, rank, world_size, folder / "store", theirs, function, args)
    process.start()
    theirs.close()
    return process, ours


def _receive(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_SECONDS):
        raise RankError(f"rank {rank} sent no result within {_TIMEOUT_SECONDS} s")
    try:
        failed, result = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if failed:
        raise RankError(f"rank {rank}:\n{result}")
    return result


def _rank_main(
    rank: int, world_size: int, store: Path, pipe: Connection, function: Any, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["TORCH_FR_BUFFER_SIZE"] = "256"  # the watchdog reads it
    global _store
    _store = dist.FileStore(str(store), world_size)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default_pg", _store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS / 2),
    )
    try:
        pipe.send((False, function(*args)))
    except Exception:
        pipe.send((True, traceback.format_exc()))
    pipe.close()
    # Wait for the parent to kill this process: gloo's teardown can abort after a peer has exited.
    threading.Event().wait(2 * _TIMEOUT_SECONDS)


def rank_world(class_ranks: int | None = None) -> Any:
    """Return the World of a function that runs in `run_on_ranks`, or of this single process.

    The classes are sharded across each group of `class_ranks` consecutive ranks (None: all ranks).
    """
    import torch
    import torch.distributed as dist

    from trainer.world import World

    cpu = torch.device("cpu")
    if not dist.is_initialized():
        return World(0, 1, 0, 1, cpu, None)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = rank_mesh(size // (class_ranks or size))
    return World(rank, size, rank, size, cpu, mesh, _agreement_group(), store=_store)


@cache
def rank_mesh(data_axis: int = 1) -> Any:
    """Return the mesh `data` x `class` over all ranks, with a `data` axis of this size. This is a
    collective call.

    Created once per rank, because connecting the process groups of a mesh takes longer than a step.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = (data_axis, dist.get_world_size() // data_axis)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "class"))


@cache
def _agreement_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(timeout=timedelta(seconds=60), backend="gloo")

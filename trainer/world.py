"""The world of a run: this process's rank, device and mesh; made once, passed explicitly."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class World:
    """`mesh` has the axes `data` x `class`; it is None in one process, which needs no group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD if self.size > 1 else None

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def open_world(
    device: Literal["auto", "cpu", "cuda"] = "auto", *, timeout_minutes: float = 10
) -> Iterator[World]:
    """The world that torchrun (or `kway train`) describes in the environment, closed at the end.

    After an error in a world of several, end the process by `leave`.

    Raises ValueError where a CUDA device is asked for and there is none for this rank.
    """
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        )
    )
    chosen = _device(device, local_rank)
    # The same number of threads however the ranks were launched: sums depend on it.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_parent()
    if size == 1:
        yield World(rank, size, local_rank, chosen, None)
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    mesh = init_device_mesh(chosen.type, (1, size), mesh_dim_names=("data", "class"))
    yield World(rank, size, local_rank, chosen, mesh)
    # Objects that still hold the group make its destruction abort the process now and then. After
    # an error its traceback holds them: then the group is left to the end of the process.
    gc.collect()
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End a rank with this exit code, whatever its process group's threads are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(wanted: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if wanted == "cuda" and local_rank >= count:
        raise ValueError(
            f"train.device is cuda and this machine shows {count} CUDA devices, rank {local_rank} "
            "needs one of its own: start fewer processes or set train.device=cpu"
        )
    if wanted == "cpu" or count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _die_with_parent() -> None:
    """A launcher that is killed outright takes its ranks along instead of leaving them training."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""The world of a run: this process's rank, device and mesh, made once and passed explicitly; and
whether an error means that another rank is gone: gloo and torch's stores say so in words."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from heads.collectives import announced

# Collectives that torch's flight recorder keeps: what the watchdog names a hung one by.
_RECORDED_COLLECTIVES = 256
# The watchdog speaks at the timeout; the process groups, which name no rank, a little later.
_GROUP_GRACE_SECONDS = 5

ClassGroup = Literal["world", "node"] | int
_LOST_RANK_MESSAGES = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "Connection refused",
    "NCCL communicator was aborted",
    "remote process exited",
)


@dataclass(frozen=True)
class World:
    """`mesh` has the axes `data` x `class`; it is None in one process, which needs no group."""

    rank: int
    size: int
    local_rank: int
    local_size: int
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
            with announced("barrier"):
                dist.barrier()


@contextmanager
def open_world(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    class_group: ClassGroup = "world",
    timeout_seconds: float = 600,
) -> Iterator[World]:
    """The world that torchrun (or `kway train`) describes in the environment, closed at the end.

    `class_group` ranks in a row share the classes. After an error in a world of several, end the
    process by `leave`. Raises ValueError where a CUDA device is asked for and there is none for
    this rank, and where the class group does not divide the ranks.
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
    shape = mesh_shape(class_group, size=size, local_size=local_size)
    chosen = _device(device, local_rank)
    # Sums depend on it: a run that goes on with another number ends with other last bits.
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)) // local_size))
    torch.set_num_threads(max(1, threads))
    if size == 1:
        yield World(rank, size, local_rank, local_size, chosen, None)
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    # Both, whatever the device: what the ranks agree on travels as CPU tensors.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds + _GROUP_GRACE_SECONDS)
    dist.init_process_group(backend, timeout=timeout)
    mesh = init_device_mesh(chosen.type, shape, mesh_dim_names=("data", "class"))
    for axis in ("data", "class"):  # which keep torch's default otherwise
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(axis))
    yield World(rank, size, local_rank, local_size, chosen, mesh)
    # Objects that still hold the group make its destruction abort the process now and then. After
    # an error its traceback holds them: then the group is left to the end of the process.
    gc.collect()
    dist.destroy_process_group()


def mesh_shape(class_group: ClassGroup, *, size: int, local_size: int) -> tuple[int, int]:
    """Ranks along `data` and along `class`; ValueError where the second does not divide."""
    match class_group:
        case "world":
            ranks = size
        case "node":
            ranks = local_size
        case _:
            ranks = class_group
    if size % ranks:
        raise ValueError(
            f"train.class_group is {class_group}, {ranks} ranks, and there are {size}: choose a "
            "number that divides them, or world"
        )
    return size // ranks, ranks


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


def is_lost_rank(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from or during, is about another rank's end."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if _is_of_a_connection(found):
            return True
        seen.append(found)
        found = found.__cause__ or found.__context__
    return False


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, DistNetworkError | DistStoreError | DistBackendError):
        return True
    # A data source's own connection errors are OSError, and no rank's.
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in _LOST_RANK_MESSAGES
    )

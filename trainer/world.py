"""The world of a run: this process's rank, device and mesh, created once and passed explicitly.

`is_lost_rank` detects errors caused by the exit of another rank. gloo and torch's stores report
the cause only in the error message.
"""

import gc
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Literal, NoReturn

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import (
    DistBackendError,
    DistNetworkError,
    DistStoreError,
    ProcessGroup,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from heads.collectives import hooked

# The size of torch's flight recorder, from which the watchdog reads the name of a hung collective.
_RECORDED_COLLECTIVES = 256
# The process groups time out shortly after the watchdog. Their errors do not name a rank, so the
# watchdog must report first.
_GROUP_GRACE_SECONDS = 5

# The size of a group of ranks in a recipe: all ranks, the ranks of a machine, or a number of
# consecutive ranks.
RankGroup = Literal["world", "node"] | Annotated[int, Field(gt=0)]
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
    """This process's rank, the world size, the device and the mesh.

    `mesh` has the axes `data` and `class`. It is None in a single process without process groups;
    a mesh of one rank is only used to run the collectives on one device (see `axis_group`).
    `agreement_group` is a gloo group of all ranks for collectives that run at the same time as
    others. It is None if the world size is 1. `timeout` is the timeout of the process groups (None:
    torch's default). `store` is the store of the rendezvous (None in a single process); see
    `new_store`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    mesh: DeviceMesh | None
    agreement_group: ProcessGroup | None = None
    timeout: timedelta | None = None
    store: dist.Store | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of all ranks, or None if there are no process groups."""
        return None if self.mesh is None else dist.group.WORLD

    def create_mesh(self, shape: tuple[int, int], axes: tuple[str, str]) -> DeviceMesh:
        """Return a mesh over all ranks, row by row (collective)."""
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=axes)
        for group in mesh.get_all_groups():
            if self.timeout is not None:  # otherwise the groups keep torch's default timeout
                group.set_timeout(self.timeout)
            _connect(group, self.device)
        return mesh

    def new_store(self) -> dist.Store:
        """Return an empty store that all ranks share (collective). Reading it has no time limit.

        It has its own connection, because the process groups may block theirs while they wait. The
        name is random, because the rendezvous may still store the keys of an earlier start.
        """
        if self.store is None:
            assert self.size == 1  # the other ranks would wait forever
            return dist.HashStore()
        name = torch.tensor([secrets.randbits(62)])
        dist.broadcast(name, src=0)
        return dist.PrefixStore(f"kway-{name.item():x}", self.store.clone())  # type: ignore[attr-defined]

    def barrier(self) -> None:
        if self.group is not None:
            with hooked("barrier"):
                dist.barrier()


@contextmanager
def open_world(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    class_group: RankGroup = "world",
    timeout_seconds: float = 600,
) -> Iterator[World]:
    """Open the world that torchrun or `kway train` describes in environment variables.

    The classes are sharded across each group of `class_group` consecutive ranks. The process groups
    are destroyed when the context ends without an error. If there is an error and more than one
    rank, end the process with `leave`. Raises ValueError if CUDA is requested but this rank does
    not have a device, or if the class group size does not divide the number of ranks.
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
    ranks = group_ranks(class_group, key="train.class_group", size=size, local_size=local_size)
    chosen = _device(device, local_rank)
    # The number of threads affects the rounding of sums. Results are not bitwise identical after
    # resuming with a different number of threads.
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)) // local_size))
    torch.set_num_threads(max(1, threads))
    if size == 1:
        yield World(rank, size, local_rank, local_size, chosen, None)
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    # gloo is required with CUDA too, because the per-step agreement between ranks uses CPU tensors.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds + _GROUP_GRACE_SECONDS)
    # Do not pass `device_id`, although NCCL would then connect immediately. With `device_id`, torch
    # 2.13 creates the groups of a mesh with `split_group`, which also passes NCCL's options to
    # gloo. A later `new_group` of gloo can also hang or crash (pytorch#145376), because ranks
    # outside the new group take part in an NCCL collective that its members do not call.
    # `device_id` is not needed: NCCL uses the device of the tensor in `_connect`, and barriers use
    # gloo, because the group has a CPU backend.
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    groups = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=timeout)
    _connect(dist.group.WORLD, chosen)
    world = World(
        rank, size, local_rank, local_size, chosen, mesh=None, timeout=timeout, store=store
    )
    mesh = world.create_mesh((size // ranks, ranks), ("data", "class"))
    agreement = dist.new_group(timeout=timeout, backend="gloo", group_desc="agreement")
    yield replace(world, mesh=mesh, agreement_group=agreement)
    # Destroying a group while objects still refer to it sometimes aborts the process. After an
    # error, the traceback refers to such objects, so the group is not destroyed (no `finally`).
    gc.collect()
    dist.destroy_process_group()


def _connect(group: ProcessGroup | None, device: torch.device) -> None:
    """Make NCCL connect the ranks of a group now instead of in its first collective, so that errors
    appear before the model is built and the first step is not slower (collective).
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def group_ranks(group: RankGroup, *, key: str, size: int, local_size: int) -> int:
    """Return the number of ranks in each group, given the value of the recipe's `key`. Raises
    ValueError if it does not divide `size`, the number of ranks of the run.
    """
    match group:
        case "world":
            ranks = size
        case "node":
            ranks = local_size
        case _:
            ranks = group
    if size % ranks:
        raise ValueError(
            f"{key} is {group} ({ranks} ranks), which does not divide the {size} ranks of the run: "
            f"choose a divisor of {size}, or world"
        )
    return ranks


def leave(code: int) -> NoReturn:
    """Exit immediately with `code`, without waiting for threads of the process groups."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(requested: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if requested == "cuda" and local_rank >= count:
        raise ValueError(
            f"train.device is cuda, but there is no CUDA device for local rank {local_rank} (this "
            f"machine has {count}): start fewer processes or set train.device=cpu"
        )
    if requested == "cpu" or count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's random number generators on the CPU and on `device`."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Restore the result of `random_state`, or of its first item alone."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether `error`, or an error in its cause or context chain, means that another rank
    exited."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if _is_connection_error(found):
            return True
        seen.append(found)
        found = found.__cause__ or found.__context__
    return False


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, DistNetworkError | DistStoreError | DistBackendError):
        return True
    # Connection errors of a data source are OSErrors, but do not mean that another rank exited.
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in _LOST_RANK_MESSAGES
    )

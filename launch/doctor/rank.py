"""One rank of the doctor's smoke test: checks each collective and prints its result as JSON.

Usage: `python -m launch.doctor.rank STORE_PORT RANK SIZE BACKEND`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_SECONDS = 10
_LARGE = 4 << 20  # float32 numbers, 16 MiB
_DTYPES = (torch.float32, torch.bfloat16)

Collective = Callable[[int, int, torch.dtype, torch.device], None]


def all_reduce(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    mine = torch.full((5,), rank + 1.0, dtype=dtype, device=device)
    dist.all_reduce(mine)
    _check(mine, torch.full((5,), size * (size + 1) / 2))
    mine.fill_(rank)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    _check(mine, torch.full((5,), size - 1.0))


def all_gather_single(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gathered = torch.empty(3 * size, dtype=dtype, device=device)
    dist.all_gather_single(gathered, torch.full((3,), float(rank), dtype=dtype, device=device))
    _check(gathered, torch.arange(size).repeat_interleave(3))


def reduce_scatter_single(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    mine = torch.empty(3, dtype=dtype, device=device)
    parts = torch.arange(size, dtype=dtype, device=device).repeat_interleave(3)
    dist.reduce_scatter_single(mine, parts)
    _check(mine, torch.full((3,), float(rank * size)))


def broadcast(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    mine = torch.full((5,), rank + 7.0, dtype=dtype, device=device)
    dist.broadcast(mine, src=0)
    _check(mine, torch.full((5,), 7.0))


def barrier(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    dist.barrier()


COLLECTIVES: tuple[Collective, ...] = (
    all_reduce,
    all_gather_single,
    reduce_scatter_single,
    broadcast,
    barrier,
)


def names() -> Iterator[str]:
    """Yield the names that a rank reports, in this order: `all_reduce float32`, …, `barrier`."""
    for collective in COLLECTIVES:
        for dtype in _DTYPES[: 1 if collective is barrier else None]:
            kind = "" if collective is barrier else f" {str(dtype).removeprefix('torch.')}"
            yield f"{collective.__name__}{kind}"


def main() -> None:
    port, rank, size = map(int, sys.argv[1:4])
    backend = sys.argv[4]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    torch.set_num_threads(1)
    remaining = names()
    for collective in COLLECTIVES:
        for dtype in _DTYPES[: 1 if collective is barrier else None]:
            collective(rank, size, dtype, device)
            _report(done=next(remaining))
    _report(done="speed", bytes_per_second=_speed(device))
    # Skip gloo's shutdown, which sometimes aborts the process if a peer has already exited.
    os._exit(0)


def _speed(device: torch.device) -> float:
    """Measure the bytes per second of an all-reduce of a large tensor."""
    large = torch.ones(_LARGE, device=device)
    seconds = []
    for _ in range(3):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(large)
        large[0].item()  # wait for the GPU
        seconds.append(time.perf_counter() - started)
    return 4 * _LARGE / min(seconds)


def _check(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found.double().cpu(), expected.double()):
        raise RuntimeError(f"returned {found.tolist()} instead of {expected.tolist()}")


def _report(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()

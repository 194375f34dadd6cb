"""Runs the collectives that kway uses between ranks on this machine, and checks their results.

torchrun runs this module as each rank: `python -m launch.doctor.collectives BACKEND`. A rank that
fails and, after success, rank 0 print one line that starts with `found: `.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# The timeout of a collective, and of all of them including the imports of the ranks.
_SECONDS, _TOTAL_SECONDS = 10, 90
_LARGE = 4 << 20  # float32 numbers, 16 MiB
_MARK = "found: "


def run_collectives(backend: str, size: int) -> tuple[bool, str]:
    """Run every collective on `size` ranks. Returns whether all are correct, and a line that
    contains the rate or names the collective that failed."""
    module = ["-m", "launch.doctor.collectives", backend]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    try:
        done = subprocess.run(
            [sys.executable, "-P", *launcher, *module],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TOTAL_SECONDS,
            env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return False, f"no result within {_TOTAL_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    # If a rank fails, the others report only that they lost it.
    line = (
        lines[0].removeprefix(_MARK) if lines else (done.stderr.splitlines() or ["no output"])[-1]
    )
    return done.returncode == 0, line


def main() -> None:
    """One rank: run each collective on float32 and bfloat16, and check the results."""
    backend, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    name = "init_process_group"
    try:
        if backend == "nccl":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=_SECONDS))
        numbers = torch.arange(size, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.full((3,), float(rank), dtype=dtype, device=device)
            name = "broadcast"
            dist.broadcast(copy := mine.clone(), src=size - 1)
            _check(copy, torch.full((3,), size - 1.0))
            name = "all_reduce"
            dist.all_reduce(copy := mine.clone())
            _check(copy, torch.full((3,), size * (size - 1) / 2))
            name = "all_gather"
            dist.all_gather_single(gathered := mine.repeat(size), mine)
            _check(gathered, numbers.repeat_interleave(3))
            name = "reduce_scatter"
            dist.reduce_scatter_single(mine, gathered)
            _check(mine, torch.full((3,), float(rank * size)))
        name = "barrier"
        dist.barrier()
        name = "all_reduce of 16 MiB"
        large, times = torch.ones(_LARGE, device=device), []
        for _ in range(3):
            started = time.perf_counter()
            dist.all_reduce(large)
            large[0].item()  # wait for the GPU
            times.append(time.perf_counter() - started)
    except (RuntimeError, ValueError) as error:
        print(f"{_MARK}rank {rank}, {name}: {' '.join(str(error).split())[:160]}", flush=True)
        os._exit(1)
    if rank == 0:
        rate = 4 * _LARGE / min(times) / 2**30
        print(f"{_MARK}all collectives are correct; all_reduce {rate:.1f} GiB/s", flush=True)
    # Skip gloo's shutdown, which sometimes aborts the process if a peer has already exited.
    os._exit(0)


def _check(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found.double().cpu(), expected.double().cpu()):
        raise RuntimeError(f"returned {found.tolist()} instead of {expected.tolist()}")


if __name__ == "__main__":
    main()

"""The checks of `kway doctor`, except the collectives (`collectives.py`).

A check yields findings of its topic, each one line with the fix unless the level is ok. The module
does not import torch, because the installation of torch may be broken.
"""

import ctypes
import fcntl
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from data.extras import EXTRAS, requirements

_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_TIME_ERROR = 5  # return value of adjtimex for an unsynchronized clock


@dataclass(frozen=True)
class Finding:
    """The result of a check, with a fix unless the level is ok.

    error: training would fail or may lose data. warning: it may be slow, or fail later.
    """

    level: Literal["ok", "warning", "error"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Workload:
    """The training run that this machine is checked for.

    ranks: ranks on this machine. shared_bytes: memory in /dev/shm that all loader processes use; by
    default, for batches of 256 images of 224 x 224 pixels. port, peers: port of the rendezvous, and
    ports of other machines.
    """

    run: Path
    ranks: int = 2
    shared_bytes: int = 4 * 4 * 256 * 224 * 224 * 3
    port: int | None = None
    peers: tuple[tuple[str, int], ...] = ()


# ------------------------------------------------------------------ versions and devices


def packages(workload: Workload) -> Iterator[Finding]:
    """Check that every required package has a supported version. Lists missing extras."""
    missing, shown = [], [f"Python {platform.python_version()}"]
    for need in requirements() + [one for extra in EXTRAS for one in requirements(extra)]:
        try:
            found = version(need.name)
        except PackageNotFoundError:
            missing.append(need.name)
            continue
        if not need.specifier.contains(found, prereleases=True):
            line = f"{need.name} {found} is installed, but kway requires {need.specifier}"
            yield Finding("error", line, f"pip install '{need.name}{need.specifier}'")
        if need.name in ("torch", "transformers", "deepspeed", "ray", "webdataset"):
            shown.append(f"{need.name} {found}")
    without = f"; not installed: {', '.join(missing)} (optional)" if missing else ""
    yield Finding("ok", ", ".join(shown) + without)


def torch_build(workload: Workload) -> Iterator[Finding]:
    """Check that torch can be imported and can use the GPUs."""
    try:
        import torch
    except (ImportError, OSError) as failure:
        line = f"torch cannot be imported: {str(failure).splitlines()[0]}"
        yield Finding("error", line, "pip install --force-reinstall torch")
        return
    count = torch.cuda.device_count()
    if not count and _DRIVER.exists():
        yield Finding(
            "error",
            f"{torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs of this machine",
            "install a torch build for a CUDA version that the driver supports (nvidia-smi shows "
            "it); in a container, enable GPU access (docker run --gpus all)",
        )
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else ""
    built = f"CUDA {torch.version.cuda}, NCCL {nccl}" if count else "no GPU: training uses the CPU"
    yield Finding("ok", f"{torch.__version__}, {built}")
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_properties(index).name
        line = f"GPU {index}: {name}, {_size(free)} of {_size(total)} free"
        fix = "run nvidia-smi to find the processes that use the rest"
        yield Finding("ok", line) if free > 0.9 * total else Finding("warning", line, fix)


# ------------------------------------------------------------------ limits


def shared_memory(workload: Workload) -> Iterator[Finding]:
    """Check /dev/shm, through which loaders pass batches. If it is full, SIGBUS kills them."""
    free = shutil.disk_usage("/dev/shm").free
    line = f"{_size(free)} free; loaders need about {_size(workload.shared_bytes)}"
    if workload.shared_bytes <= free / 2:
        yield Finding("ok", line)
    else:
        fix = (
            "docker run --shm-size=16g (Kubernetes: an emptyDir with medium Memory at /dev/shm), "
            "or lower data.workers"
        )
        yield Finding("error" if workload.shared_bytes > free else "warning", line, fix)


def open_files(workload: Workload) -> Iterator[Finding]:
    """Check the limit on open files. Each process needs a file for every shard that it reads and
    sockets for the other ranks."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    line = f"{files} per process"
    if 0 <= files < 4096:
        fix = f"ulimit -n {hard}" if hard >= 4096 else "docker run --ulimit nofile=65536"
        yield Finding("error" if files < 512 else "warning", line, fix)
    else:
        yield Finding("ok", line)


# ------------------------------------------------------------------ storage


def run_folder(workload: Workload) -> Iterator[Finding]:
    """Check the free space, the speed, and the operations that committing a checkpoint needs."""
    path = workload.run.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        with TemporaryDirectory(prefix=".kway-doctor-", dir=folder) as trial:
            speed = _try_commit(Path(trial))
    except OSError as failure:
        line = f"checkpoints cannot be written in {folder}: {failure.strerror or failure}"
        fix = (
            "choose another `run` folder, whose file system supports flock and rename, grant this "
            "user write access, or raise its limits (quota, ulimit -f)"
        )
        yield Finding("error", line, fix)
        return
    free = shutil.disk_usage(folder).free
    line = f"{folder} writes {speed / 2**20:,.0f} MiB/s, {_size(free)} free"
    if free < 20 * _GIB:
        fix = "free disk space, lower checkpoint.keep_last, or choose another `run` folder"
        yield Finding("error" if free < _GIB else "warning", f"{line} (see kway plan)", fix)
    else:
        yield Finding("ok", line)


def _try_commit(folder: Path) -> float:
    """Run the operations of a checkpoint commit and return the write rate in bytes/s."""
    started, size = time.perf_counter(), 8 << 20
    for _ in range(2):  # the second file replaces the first
        with (partial := folder / "probe.partial").open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.replace(folder / "probe")
    seconds = time.perf_counter() - started
    (folder / "step.partial").mkdir()
    (folder / "step.partial").rename(folder / "step-00000000")
    return 2 * size / seconds


# ------------------------------------------------------------------ network


def network(workload: Workload) -> Iterator[Finding]:
    """Check what a rendezvous with other machines needs: ports, addresses and clocks."""
    if workload.port is not None:
        with socket.socket() as server:
            # The rendezvous store also sets this option, so a port in TIME_WAIT counts as free.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", workload.port))
                yield Finding("ok", f"port {workload.port} is free for the rendezvous")
            except OSError as failure:
                line = f"port {workload.port} cannot be used: {failure.strerror}"
                fix = f"stop the program that uses it (ss -ltnp 'sport = :{workload.port}'), or "
                yield Finding("error", line, f"{fix}choose another port in --rdzv-endpoint")
    for host, port in workload.peers:
        try:
            socket.create_connection((host, port), timeout=3).close()
            yield Finding("ok", f"{host}:{port} accepts connections")
        except OSError as failure:
            fix = f"run python3 -m http.server {port} there, and open the port in firewalls"
            yield Finding("error", f"{host}:{port} does not respond: {failure}", fix)
    if workload.port is None and not workload.peers:
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name, found = socket.gethostname(), set[str]()
        with suppress(socket.gaierror):
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        if all(address.startswith("127.") or address == "::1" for address in found):
            line = f"gloo listens on {name}, which other machines cannot reach"
            fix = "set GLOO_SOCKET_IFNAME to the interface of the cluster (ip -brief address)"
            yield Finding("warning", line, fix)
    # If `modes` is 0, adjtimex only reads the clock state. The struct has at most 208 bytes.
    if ctypes.CDLL(None).adjtimex((ctypes.c_byte * 1024)()) == _TIME_ERROR:
        fix = "synchronize the clocks of all machines: systemctl enable --now chrony"
        yield Finding("warning", "the clock is not synchronized by a time service", fix)


def _size(num_bytes: float) -> str:
    """Format as `1.5 GiB`, or as `200 MiB` below 1 GiB."""
    gib = num_bytes / _GIB
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.0f} MiB"


def collectives(workload: Workload) -> Iterator[Finding]:
    """Run the collectives between ranks on this machine, with gloo and, if possible, NCCL."""
    import torch

    from launch.doctor.collectives import run_collectives

    fixes = {
        "gloo": "set GLOO_SOCKET_IFNAME to an interface that is up (lo for a single machine)",
        "nccl": "run again with NCCL_DEBUG=WARN; try NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1",
    }
    # NCCL does not support two ranks on one device.
    sizes = {"gloo": workload.ranks, "nccl": torch.cuda.device_count()}
    for backend, size in sizes.items():
        if size:
            is_correct, line = run_collectives(backend, size)
            line = f"{backend}, {size} ranks: {line}"
            yield Finding("ok", line) if is_correct else Finding("error", line, fixes[backend])


CHECKS: dict[str, Callable[[Workload], Iterator[Finding]]] = {
    "versions": packages,
    "shared memory": shared_memory,
    "open files": open_files,
    "run folder": run_folder,
    "network": network,
    # torch may be broken. The check after this one needs it.
    "torch": torch_build,
    "collectives": collectives,
}

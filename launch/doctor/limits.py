"""Checks of system and container limits: files, processes, shared and main memory, CPUs, threads.

Container limits come from Linux control groups, version 1 or 2. The limit of a group also applies
to its descendants, so the smallest limit on the path to the root takes effect.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from launch.doctor.check import Finding, Workload, error, in_gib, ok, warning

_FEW_FILES, _TOO_FEW_FILES = 4096, 512
_FEW_PROCESSES = 1024
_SHARED = Path("/dev/shm")
_GIB_PER_RANK = 2
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 reports a number near 2^63 if there is no limit


def open_files(workload: Workload) -> Iterator[Finding]:
    """Check the limit on open files.

    Each process needs one file for every shard that it reads, and one or two sockets for every
    other rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        yield ok("open files", f"{_number(soft)} per process")
        return
    remedy = f"run ulimit -n {min(1 << 16, hard) if hard > 0 else 1 << 16} before training"
    if 0 < hard < _FEW_FILES:
        remedy = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    make = error if soft < _TOO_FEW_FILES else warning
    line = f"{soft} per process, which must suffice for its shards and sockets"
    yield make("open files", line, remedy)


def processes(workload: Workload) -> Iterator[Finding]:
    """Check the user's and the container's limits on processes and threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [limit for limit in (soft, process_limit()) if limit is not None and limit > 0]
    smallest = min(limits, default=None)
    if smallest is None or smallest >= _FEW_PROCESSES:
        shown = "unlimited" if smallest is None else f"{smallest:,}"
        yield ok("processes", f"{shown}, including threads")
        return
    line = f"{smallest:,}, including threads: {workload.ranks} ranks with loaders may need more"
    remedy = "ulimit -u 65536, or docker run --pids-limit=-1 (Kubernetes: podPidsLimit)"
    yield warning("processes", line, remedy)


def shared_memory(workload: Workload, folder: Path = _SHARED) -> Iterator[Finding]:
    """Check /dev/shm, through which loaders pass batches. If it is full, SIGBUS kills them."""
    if not folder.is_dir():
        remedy = "mount a tmpfs there, or train with data.workers=0"
        yield error("shared memory", f"{folder} does not exist", remedy)
        return
    usage = shutil.disk_usage(folder)
    line = f"{in_gib(usage.free)} of {in_gib(usage.total)} free in {folder}"
    assumed = " (4 per rank, batch 256)" if workload.workers is None else ""
    need = f"loaders{assumed} need about {in_gib(workload.shared_bytes)}"
    if workload.shared_bytes <= usage.free / 2:
        yield ok("shared memory", f"{line}; {need}")
        return
    remedy = (
        "docker run --shm-size=16g (Kubernetes: an emptyDir with medium Memory at /dev/shm), or "
        "lower data.workers"
    )
    make = error if workload.shared_bytes > usage.free else warning
    yield make("shared memory", f"{line}; {need}", remedy)


def memory(workload: Workload) -> Iterator[Finding]:
    """Check the main memory and the memory limit of the container.

    The kernel kills processes that exceed the limit, even if the machine has more memory.
    """
    machine = psutil.virtual_memory()
    limit = memory_limit()
    if limit is not None and limit < machine.total:
        line = f"limited to {in_gib(limit)} of the machine's {in_gib(machine.total)}"
        available = min(limit, machine.available)
    else:
        line = f"{in_gib(machine.available)} of {in_gib(machine.total)} available"
        available = machine.available
    if available >= workload.ranks * _GIB_PER_RANK * 2**30:
        yield ok("memory", line)
        return
    need = f"{workload.ranks} ranks need {_GIB_PER_RANK} GiB each, not including the model"
    remedy = "raise the limit, start fewer ranks or free memory"
    yield warning("memory", f"{line}; {need}", remedy)


def cpus(workload: Workload) -> Iterator[Finding]:
    """Check the number of CPUs that this container may use.

    Libraries start one thread per CPU of the machine. If the container may use fewer CPUs, the
    threads slow each other down.
    """
    count = os.cpu_count() or 1
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    usable = min(allowed, quota or allowed)
    if usable < count:
        yield warning(
            "CPUs",
            f"{usable:g} of the machine's {count} are available, but torch starts threads for all "
            "of them",
            "reserve whole CPUs for the job, or use a smaller machine, because every step is "
            "slowed down by threads that are waiting for a CPU",
        )
    workers = workload.workers or 0
    loaders = f" with {workers} loaders each" if workers else ""
    line = f"{usable:g} for {workload.ranks} ranks{loaders}"
    if workload.ranks * (1 + workers) > 2 * usable:
        yield warning(
            "CPUs", line, "lower data.workers or --nproc, because the processes share CPUs"
        )
    elif usable >= count:
        yield ok("CPUs", line)


def threads(workload: Workload) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS, which torchrun and kway train set if it is unset."""
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        yield ok(
            "threads", "OMP_NUM_THREADS is unset: kway train divides the cores among the ranks"
        )
        return
    if not text.isdecimal() or int(text) == 0:
        yield error("threads", f"OMP_NUM_THREADS is {text!r}", "unset it, or set it to 1")
        return
    total, count = int(text) * workload.ranks, os.cpu_count() or 1
    line = f"OMP_NUM_THREADS is {text}: {total} threads for {workload.ranks} ranks on {count} CPUs"
    if total > count:
        yield warning("threads", line, f"set it to {max(1, count // workload.ranks)} or less")
    else:
        yield ok("threads", line)


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def memory_limit(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int | None:
    """Return the memory limit in bytes, or None."""
    texts = _texts(root, membership, "memory", ("memory.max", "memory.limit_in_bytes"))
    return _smallest(texts)


def process_limit(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int | None:
    """Return the limit on processes and threads, or None."""
    return _smallest(_texts(root, membership, "pids", ("pids.max",)))


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> float | None:
    """Return the limit on CPU time as a number of CPUs, such as 1.5, or None."""
    quotas = []
    for folder in _folders(root, membership, "cpu"):
        if (new := folder / "cpu.max").is_file():
            quota, _, period = new.read_text().partition(" ")
        elif (old := folder / "cpu.cfs_quota_us").is_file():
            quota, period = old.read_text(), (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota.strip() not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _smallest(texts: Iterator[str]) -> int | None:
    limits = [int(text) for text in texts if text != "max"]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _texts(root: Path, membership: Path, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    for folder in _folders(root, membership, controller):
        for name in names:
            if (file := folder / name).is_file():
                yield file.read_text().strip()


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of the group's ancestors."""
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        # Inside a container, the ancestors of the container's group are not mounted.
        inner = base / path.lstrip("/")
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(base))

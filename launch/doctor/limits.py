"""What the system lets a process have: files, processes, shared memory, memory, CPUs, threads."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from launch.doctor import cgroup
from launch.doctor.finding import Finding, error, in_gib, ok, warning
from launch.doctor.plans import Plans

_FEW_FILES, _TOO_FEW_FILES = 4096, 512
_FEW_PROCESSES = 1024
_SHARED = Path("/dev/shm")
_GIB_A_RANK = 2


def open_files(plans: Plans) -> Iterator[Finding]:
    """A process holds each shard it reads open, and a socket or two for every other rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        yield ok("open files", f"{_number(soft)} a process")
        return
    remedy = f"ulimit -n {min(1 << 16, hard) if hard > 0 else 1 << 16} before training"
    if 0 < hard < _FEW_FILES:
        remedy = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    make = error if soft < _TOO_FEW_FILES else warning
    line = f"{soft} a process: each holds every shard it reads open, and its sockets"
    yield make("open files", line, remedy)


def processes(plans: Plans) -> Iterator[Finding]:
    """Of the user and of the container; threads count."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [limit for limit in (soft, cgroup.process_limit()) if limit is not None and limit > 0]
    smallest = min(limits, default=None)
    if smallest is None or smallest >= _FEW_PROCESSES:
        shown = "unlimited" if smallest is None else f"{smallest:,}"
        yield ok("processes", f"{shown}, threads included")
        return
    line = f"{smallest:,}, threads included: {plans.ranks} ranks with loaders may need more"
    remedy = "ulimit -u 65536, or docker run --pids-limit=-1 (Kubernetes: podPidsLimit)"
    yield warning("processes", line, remedy)


def shared_memory(plans: Plans, place: Path = _SHARED) -> Iterator[Finding]:
    """Loader processes hand their batches over in it; a full one ends them by SIGBUS."""
    if not place.is_dir():
        remedy = "mount a tmpfs there, or train with data.workers=0"
        yield error("shared memory", f"{place} does not exist", remedy)
        return
    usage = shutil.disk_usage(place)
    line = f"{in_gib(usage.free)} of {in_gib(usage.total)} free in {place}"
    assumed = " (4 a rank, batch 256)" if plans.workers is None else ""
    need = f"loaders{assumed} hold about {in_gib(plans.shared_bytes)}"
    if plans.shared_bytes <= usage.free / 2:
        yield ok("shared memory", f"{line}; {need}")
        return
    remedy = (
        "docker run --shm-size=16g (Kubernetes: an emptyDir of medium Memory at /dev/shm), or "
        "lower data.workers"
    )
    make = error if plans.shared_bytes > usage.free else warning
    yield make("shared memory", f"{line}; {need}", remedy)


def memory(plans: Plans) -> Iterator[Finding]:
    """The container's limit, not the machine's memory, is where the system starts to kill."""
    machine = psutil.virtual_memory()
    limit = cgroup.memory_limit()
    if limit is not None and limit < machine.total:
        line = f"limited to {in_gib(limit)} of the machine's {in_gib(machine.total)}"
        room = min(limit, machine.available)
    else:
        line = f"{in_gib(machine.available)} of {in_gib(machine.total)} available"
        room = machine.available
    if room >= plans.ranks * _GIB_A_RANK * 2**30:
        yield ok("memory", line)
        return
    need = f"{plans.ranks} ranks want {_GIB_A_RANK} GiB each before the model"
    remedy = "raise the limit, start fewer ranks or free memory"
    yield warning("memory", f"{line}; {need}", remedy)


def cpus(plans: Plans) -> Iterator[Finding]:
    """Threads are counted by the machine's CPUs: more of them than may run slow each other down."""
    count = os.cpu_count() or 1
    allowed, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    usable = min(allowed, quota or allowed)
    if usable < count:
        yield warning(
            "CPUs",
            f"{usable:g} of the machine's {count} may be used; torch would start threads for all",
            "give the job whole CPUs, or a machine of its own size: threads that wait for a CPU "
            "slow every step",
        )
    workers = plans.workers or 0
    loaders = f" with {workers} loaders each" if workers else ""
    line = f"{usable:g} for {plans.ranks} ranks{loaders}"
    if plans.ranks * (1 + workers) > 2 * usable:
        yield warning("CPUs", line, "lower data.workers or --nproc: they stand in line")
    elif usable >= count:
        yield ok("CPUs", line)


def threads(plans: Plans) -> Iterator[Finding]:
    """OMP_NUM_THREADS: unset, torchrun and kway train choose it."""
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        yield ok("threads", "OMP_NUM_THREADS is unset: kway train shares the cores among the ranks")
        return
    if not text.isdecimal() or int(text) == 0:
        yield error("threads", f"OMP_NUM_THREADS is {text!r}", "unset it, or set it to 1")
        return
    together, count = int(text) * plans.ranks, os.cpu_count() or 1
    line = f"OMP_NUM_THREADS is {text}: {together} threads for {plans.ranks} ranks on {count} CPUs"
    if together > count:
        yield warning("threads", line, f"set it to {max(1, count // plans.ranks)} or less")
    else:
        yield ok("threads", line)


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"

"""The limits that a container has been given: version 2 of Linux's control groups, and version 1.

A group's limit holds for all below it, so the smallest one on the way to the root counts.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for none


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes; None: no limit."""
    texts = _texts(root, membership, "memory", ("memory.max", "memory.limit_in_bytes"))
    return _smallest(texts)


def process_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Processes and threads; None: no limit."""
    return _smallest(_texts(root, membership, "pids", ("pids.max",)))


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time, such as 1.5; None: no limit."""
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
    """This process's group and those it is in, of both versions."""
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
        # What stands before a container's own group is not mounted inside it.
        inner = base / path.lstrip("/")
        yield from (place for place in (inner, *inner.parents) if place.is_relative_to(base))

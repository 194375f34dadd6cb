"""A Ray cluster of several nodes on this machine, each with its own raylet."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Ray reads these when it is imported. 0 makes it listen on loopback only.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import psutil
from ray.cluster_utils import Cluster

_OBJECT_STORE_BYTES = 80 * 2**20


class RayCluster:
    """A head node without CPUs, and worker nodes with one CPU each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**head, "object_store_memory": _OBJECT_STORE_BYTES},
        )
        self.address: str = self._cluster.address
        self._num_workers = 0

    def add_workers_until(self, num: int) -> None:
        """Start worker nodes until there are `num`."""
        while self._num_workers < num:
            self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES)
            self._num_workers += 1

    def raylets(self) -> list[int]:
        """Return the process IDs of the raylets of the worker nodes."""
        nodes = self._cluster.worker_nodes
        return [node.all_processes["raylet"][0].process.pid for node in nodes]

    def kill_raylet(self, pid: int) -> None:
        """Kill a raylet with SIGKILL. Its worker processes exit when they notice."""
        assert pid in self.raylets()
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait(10)
        nodes = self._cluster.worker_nodes
        (node,) = (one for one in nodes if one.all_processes["raylet"][0].process.pid == pid)
        self._cluster.remove_node(node, allow_graceful=False)
        self._num_workers -= 1

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.shutdown()

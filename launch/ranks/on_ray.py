"""Runs ranks on a Ray cluster, in one placement group.

Each rank is a subprocess of an actor, so it ends with its own exit code, and it ends when the actor
does. If a node or a rank is killed, all ranks are started again.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.elastic.multiprocessing import SignalException

from data.messages import pluralize
from data.ray_pool import alive_nodes, num_jobs, ray_cluster
from data.retry import TransientError
from launch.ranks.agent import kill_reason, own_exit_codes, run_exit_code
from launch.ranks.stop import StopRequest, end_processes
from trainer.process.exit_codes import FAILED, INTERRUPTED, PREEMPTED

_MAX_RESTARTS = 3
# A lost node may be replaced within this time.
_PLACEMENT_SECONDS = 600
_REPORT_AFTER_SECONDS = 5
_POLL_SECONDS = 1.0
_STOP_SECONDS = 5
# After a rank has failed, the others stop, or their node is detected as lost, within this time.
_OUTCOME_SECONDS = 15
_MAX_QUEUED_LINES = 1000
_MAX_LINE_BYTES = 1 << 16
_PACKAGES = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ranks:
    """`num_ranks` processes that run `python -m module arguments…` in the folder `cwd`.

    result_option: rank 0 gets this option with the path of a temporary file, to which it may write
    a result. gpu: True gives each rank a GPU, and None does so if the cluster has any. threads:
    OMP_NUM_THREADS of each rank.
    """

    module: str
    arguments: tuple[str, ...]
    num_ranks: int
    result_option: str
    gpu: bool | None = None
    threads: int = 1
    cwd: str = field(default_factory=os.getcwd)


def run_ranks_on_ray(ranks: Ranks, address: str) -> tuple[int, str]:
    """Run the ranks on the cluster at `address` and return the exit code and the result of rank 0.

    The nodes must share the files that the ranks read and write. Ranks on the same node are
    consecutive. The output of all ranks is printed to stderr. Raises ValueError if the cluster is
    too small, and TransientError if nodes were lost too often.
    """
    # A signal handler that raises inside a call of Ray causes a SystemError.
    with ray_cluster(address), StopRequest(raises=False) as stop:
        cpus, gpus = _resources(ranks)
        for restart in range(1, _MAX_RESTARTS + 2):
            try:
                with _actors(ranks.num_ranks, cpus, gpus, stop) as actors:
                    outcome = _watch(_start(ranks, actors, stop), stop)
            except RayActorError:
                outcome = _Outcome(lost="a node was lost while the ranks were starting")
            except SignalException as stopped:
                return (INTERRUPTED if stopped.sigval == signal.SIGINT else PREEMPTED), ""
            if not outcome.lost:
                return run_exit_code(own_exit_codes(outcome.codes).values()), outcome.result
            if restart <= _MAX_RESTARTS:
                _print(f"{outcome.lost}; restart {restart} of {_MAX_RESTARTS}")
    _print(f"error: {outcome.lost}: run the same command again")
    return FAILED, ""


def _resources(ranks: Ranks) -> tuple[int, int]:
    """Return the number of CPUs and GPUs per rank."""
    nodes = alive_nodes()
    cpus = max(1, min(ranks.threads, max(int(node.get("CPU", 0)) for node in nodes)))
    gpus = int(any(node.get("GPU") for node in nodes) if ranks.gpu is None else ranks.gpu)
    room = sum(num_jobs(node, cpus=cpus, gpus=gpus) for node in nodes)
    if room < ranks.num_ranks:
        each = pluralize(cpus, "CPU") + (" and a GPU" if gpus else "")
        raise ValueError(
            f"--nproc is {ranks.num_ranks}, but the Ray cluster has room for {room} ranks with "
            f"{each} each: add nodes, or lower --nproc or OMP_NUM_THREADS"
        )
    return cpus, gpus


@contextmanager
def _actors(num_ranks: int, cpus: int, gpus: int, stop: StopRequest) -> Iterator[list[Any]]:
    """Start an actor for each rank, on as few nodes as possible."""
    group = placement_group([{"CPU": cpus, "GPU": gpus}] * num_ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        _wait(group, num_ranks, stop)
        strategy = PlacementGroupSchedulingStrategy(group)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
        actors += [ray.remote(_Rank).options(**options).remote() for _ in range(num_ranks)]
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)  # a rank ends with its actor, because it calls `die_with_parent`
        remove_placement_group(group)


def _wait(group: Any, num_ranks: int, stop: StopRequest) -> None:
    for seconds in range(_PLACEMENT_SECONDS):
        if group.wait(1):
            return
        stop.check()
        if seconds == _REPORT_AFTER_SECONDS:
            _print(f"waiting until the Ray cluster has room for {num_ranks} ranks")
    raise TransientError(
        f"the Ray cluster had no room for {num_ranks} ranks for {_PLACEMENT_SECONDS} s: add nodes, "
        "and run the same command again"
    )


class _Place(NamedTuple):
    node: str
    host: str
    port: int  # a free port
    gpus: list[str]


class _Seen(NamedTuple):
    """New output of a rank, and its exit code and result if it has exited."""

    output: str
    code: int | None
    result: str


class _Rank:
    """The actor of a rank."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="kway-")
        self._result = Path(self._folder.name) / "result"
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_QUEUED_LINES)
        self._stopped = False

    def place(self) -> _Place:
        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = [str(gpu) for gpu in context.get_accelerator_ids()["GPU"]]
        return _Place(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def start(self, ranks: Ranks, environment: dict[str, str]) -> None:
        if not Path(ranks.cwd).is_dir():
            raise ValueError(
                f"{ranks.cwd} does not exist on the node {socket.gethostname()}: run the command "
                "in a folder that all nodes share"
            )
        arguments = list(ranks.arguments)
        if environment["RANK"] == "0":
            arguments.insert(0, f"{ranks.result_option}={self._result}")
        # The actor imports kway from a path that may not be in the node's PYTHONPATH.
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: see `run_ranks`
            [sys.executable, "-P", "-u", "-m", ranks.module, *arguments],
            cwd=ranks.cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MAX_LINE_BYTES):
            self._lines.put(line)

    def poll(self) -> _Seen:
        """Wait for new output for at most a second."""
        lines = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=_POLL_SECONDS))
            while len(lines) < _MAX_QUEUED_LINES:
                lines.append(self._lines.get_nowait())
        output = b"".join(lines).decode(errors="replace")
        code = None if lines else self._process.poll()
        if code is not None and self._stopped:
            code = -signal.SIGTERM
        result = self._result.read_text() if code == 0 and self._result.exists() else ""
        return _Seen(output, code, result)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._stopped = True
            end_processes([self._process], signal.SIGTERM, _STOP_SECONDS)


@dataclass
class _Outcome:
    """How an attempt ended. lost: the reason if a node or a rank was killed, otherwise ''."""

    codes: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    result: str = ""


def _start(ranks: Ranks, actors: Sequence[Any], stop: StopRequest) -> list[Any]:
    """Start the ranks, and return the actors by rank."""
    places: list[_Place] = _results([actor.place.remote() for actor in actors], stop)
    placed = sorted(zip(places, actors, strict=True), key=lambda one: one[0].node)
    on_node = Counter(place.node for place, _ in placed)
    first, started = placed[0][0], []
    for rank, (place, actor) in enumerate(placed):
        before = [other.node for other, _ in placed[:rank]]
        visible = [gpu for other, _ in placed if other.node == place.node for gpu in other.gpus]
        environment = {
            "RANK": rank,
            "WORLD_SIZE": len(placed),
            "LOCAL_RANK": before.count(place.node),
            "LOCAL_WORLD_SIZE": on_node[place.node],
            "MASTER_ADDR": first.host,
            "MASTER_PORT": first.port,
            "OMP_NUM_THREADS": ranks.threads,
            # A rank selects its own GPU among those of all ranks on the node.
            "CUDA_VISIBLE_DEVICES": ",".join(visible),
        }
        started.append(actor.start.remote(ranks, {k: str(v) for k, v in environment.items()}))
    _results(started, stop)
    return [actor for _, actor in placed]


def _results(calls: list[Any], stop: StopRequest) -> list[Any]:
    while len(ray.wait(calls, num_returns=len(calls), timeout=_POLL_SECONDS)[0]) < len(calls):
        stop.check()
    return ray.get(calls)


def _watch(actors: Sequence[Any], stop: StopRequest) -> _Outcome:
    """Print the output of the ranks until all have exited, or some have failed."""
    outcome, deadline = _Outcome(), float("inf")
    polls = {actor.poll.remote(): rank for rank, actor in enumerate(actors)}
    while polls and time.monotonic() < deadline:
        stop.check()
        ready, _ = ray.wait(list(polls), timeout=_POLL_SECONDS)
        for poll in ready:
            rank = polls.pop(poll)
            if not _record(outcome, rank, poll):
                polls[actors[rank].poll.remote()] = rank
        if deadline == float("inf") and (outcome.lost or any(outcome.codes.values())):
            deadline = time.monotonic() + _OUTCOME_SECONDS
            for actor in actors:
                actor.stop.remote()
    if polls:  # these actors did not respond
        outcome.lost = outcome.lost or "a node stopped responding"
    elif -signal.SIGKILL in outcome.codes.values():
        outcome.lost = outcome.lost or kill_reason(outcome.codes) or ""
    return outcome


def _record(outcome: _Outcome, rank: int, poll: Any) -> bool:
    """Return whether the rank has exited."""
    try:
        seen: _Seen = ray.get(poll)
    except RayActorError:
        outcome.lost = f"the node or the actor of rank {rank} was lost"
        return True
    print(seen.output, end="", file=sys.stderr, flush=True)
    if seen.code is not None:
        outcome.codes[rank] = seen.code
        outcome.result = outcome.result or seen.result
    return seen.code is not None


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

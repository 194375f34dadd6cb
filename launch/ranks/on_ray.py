"""Runs ranks on a Ray cluster, in one placement group.

If a node or a rank is killed, all ranks are started again.
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.elastic.multiprocessing import SignalException

from data.messages import pluralize
from data.ray_pool import alive_nodes, num_jobs, ray_cluster
from data.retry import TransientError
from launch.ranks.agent import kill_reason, own_exit_codes, run_exit_code
from launch.ranks.ray_rank import Place, RankActor, Ranks, Seen
from launch.ranks.stop import StopRequest
from trainer.process.exit_codes import INTERRUPTED, PREEMPTED

_MAX_RESTARTS = 3
# A lost node may be replaced within this time.
_PLACEMENT_SECONDS = 600
_REPORT_AFTER_SECONDS = 5
_POLL_SECONDS = 1.0
# After a rank has failed, the others stop, or their node is detected as lost, within this time.
_OUTCOME_SECONDS = 15
_MAX_REASON_CHARS = 500


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
            except RayActorError as error:
                reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
                outcome = _Outcome(lost=f"a rank could not start ({reason})")
            except SignalException as stopped:
                return (INTERRUPTED if stopped.sigval == signal.SIGINT else PREEMPTED), ""
            if not outcome.lost:
                return run_exit_code(own_exit_codes(outcome.codes).values()), outcome.result
            if restart <= _MAX_RESTARTS:
                _print(f"{outcome.lost}; restart {restart} of {_MAX_RESTARTS}")
    raise TransientError(f"{outcome.lost}, after {_MAX_RESTARTS} restarts: run the command again")


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
        actors += [ray.remote(RankActor).options(**options).remote() for _ in range(num_ranks)]
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)  # a rank ends with its actor, because it calls `die_with_parent`
        remove_placement_group(group)


def _wait(group: Any, num_ranks: int, stop: StopRequest) -> None:
    for seconds in range(_PLACEMENT_SECONDS):
        if group.wait(1):
            if seconds > _REPORT_AFTER_SECONDS:
                _print(f"the Ray cluster has room for {num_ranks} ranks: starting them")
            return
        stop.check()
        if seconds == _REPORT_AFTER_SECONDS:
            _print(f"waiting until the Ray cluster has room for {num_ranks} ranks")
    raise TransientError(
        f"the Ray cluster had no room for {num_ranks} ranks for {_PLACEMENT_SECONDS} s: add nodes, "
        "and run the same command again"
    )


@dataclass
class _Outcome:
    """How an attempt ended. lost: the reason if a node or a rank was killed, otherwise ''."""

    codes: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    result: str = ""


def _start(ranks: Ranks, actors: Sequence[Any], stop: StopRequest) -> list[Any]:
    """Start the ranks, and return the actors by rank."""
    places: list[Place] = _results([actor.place.remote() for actor in actors], stop)
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
        seen: Seen = ray.get(poll)
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

"""If ranks really hang, every process exits on its own, and one line reports which rank hung."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from serving.addresses import free_port
from tests.ranks import forked, running, set_rank
from trainer.faults.watchdog import Watchdog
from trainer.world import World, open_world

_TIMEOUT = 3.0


class Phase:
    """The current phase, as the watchdog reads it."""

    current: str | None = None


# ---------------------------------------------------------------- code of the ranks


def train_steps(
    rank: int, watchdog: Watchdog, phase: Phase, *, act: Callable[[], None], faulty: int
) -> None:
    """Run five steps with one collective each. Rank `faulty` calls `act` before the collective in
    step 3.
    """
    for step in range(1, 6):
        watchdog.at(step)
        # The ranks of a run also exchange a message in each step. gloo counts it.
        received = dist.irecv(torch.empty(1), src=(rank - 1) % 3)
        sent = dist.isend(torch.zeros(1), dst=(rank + 1) % 3)
        received.wait(timeout=timedelta(seconds=60))
        sent.wait(timeout=timedelta(seconds=60))
        phase.current = "data"
        if rank == faulty and step == 3:
            act()
        phase.current = "head"
        dist.all_reduce(torch.ones(2))


def stop() -> None:
    time.sleep(1)  # gives this rank time to publish its state
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def rank_1_skips(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    phase.current = "head"
    for step in range(1, 4):
        watchdog.at(step)
        if rank != 1 or step != 3:
            dist.all_reduce(torch.ones(2))


def all_read_long(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    dist.all_reduce(torch.ones(2))
    phase.current = "data"
    time.sleep(1.5 * _TIMEOUT)
    dist.all_reduce(torch.ones(2))


def rank_1_sleeps_before_its_group(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    # This group has torch's default timeout of half an hour, as the groups of device meshes do.
    group = dist.new_group([0, 1], group_desc="mesh_class")
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(2), group=group)


def rank_1_stops_with_a_network(
    rank: int, watchdog: Watchdog, phase: Phase, *, wrap: Callable[..., torch.nn.Module]
) -> None:
    network = wrap(torch.nn.Linear(4, 4))
    for step in range(3):
        if rank == 1 and step == 2:
            stop()
        network(torch.ones(2, 4)).sum().backward()


# ---------------------------------------------------------------- running the ranks


def _rank_main(rank: int, size: int, port: int, act: Callable[..., None], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    set_rank(rank, size, port)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "256"
    phase = Phase()
    try:
        with (
            open_world("cpu", timeout_seconds=_TIMEOUT) as world,
            Watchdog(world, timeout_seconds=_TIMEOUT, phases=phase) as watchdog,
        ):
            act(rank, watchdog, phase)
    except RuntimeError as error:
        print(f"lost: {error}", file=sys.stderr, flush=True)
        os._exit(1)


@dataclass(frozen=True)
class Case:
    """The code that `size` ranks run. Rank `stopped` does not exit on its own."""

    act: Callable[..., None]
    size: int = 3
    stopped: int | None = None


STOPS = Case(partial(train_steps, act=stop, faulty=1), stopped=1)
STORE_STOPS = Case(partial(train_steps, act=stop, faulty=0), stopped=0)
SLEEPS = Case(partial(train_steps, act=sleep, faulty=1))
SKIPS = Case(rank_1_skips)
READS_LONG = Case(all_read_long, size=2)
LONG_TIMEOUT = Case(rank_1_sleeps_before_its_group, size=2)
DDP, FSDP = (
    Case(partial(rank_1_stops_with_a_network, wrap=wrap), size=2, stopped=1)
    for wrap in (DistributedDataParallel, fully_shard)
)
# The cases in a batch run concurrently, because they spend most of their time waiting.
BATCHES = [
    [STOPS, STORE_STOPS, READS_LONG, DDP],
    [SLEEPS, SKIPS, LONG_TIMEOUT, FSDP],
]
# Exit codes (None: still running) and all lines of all ranks.
Outcome = tuple[list[int | None], list[str]]
OutcomeOf = Callable[[Case], Outcome]


@contextmanager
def _ranks(case: Case, folder: Path) -> Iterator[list[BaseProcess]]:
    folder.mkdir()
    port = free_port("127.0.0.1", 0)
    ranks = [
        forked(_rank_main, rank, case.size, port, case.act, folder / str(rank))
        for rank in range(case.size)
    ]
    with running(ranks):
        yield ranks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> OutcomeOf:
    """Return the outcome of a case. The first call for a case in a batch runs the whole batch."""
    found: dict[Case, Outcome] = {}

    def of_case(case: Case) -> Outcome:
        if case not in found:
            (batch,) = [batch for batch in BATCHES if case in batch]
            found.update(_run(batch, tmp_path_factory.mktemp("ranks")))
        return found[case]

    return of_case


def _run(batch: list[Case], folder: Path) -> dict[Case, Outcome]:
    with ExitStack() as running:
        ranks = {
            case: running.enter_context(_ranks(case, folder / str(number)))
            for number, case in enumerate(batch)
        }
        return {
            case: _end(case, ranks[case], folder / str(number)) for number, case in enumerate(batch)
        }


def _end(case: Case, ranks: list[BaseProcess], folder: Path) -> Outcome:
    for rank, process in enumerate(ranks):
        if rank != case.stopped:
            process.join(120)
    codes = [process.exitcode for process in ranks]
    output = [(folder / str(rank)).read_text() for rank in range(case.size)]
    return codes, "".join(output).splitlines()


# ---------------------------------------------------------------- tests


def test_a_stopped_rank_is_reported_in_one_line_and_the_others_exit(outcome: OutcomeOf) -> None:
    codes, lines = outcome(STOPS)
    assert codes == [1, None, 1]
    assert len(lines) == 1, lines
    assert re.match(r"error: rank [02]: train.timeout_seconds \(3\) exceeded: rank 1: ", lines[0])
    assert "rank 1: not responding" in lines[0]
    assert "last seen at step 3 in data" in lines[0]
    # The location is in the caller, not inside torch.
    where = r"at step 3 in head \(tests.trainer.test_watchdog:\d+\) for \d+ s"
    assert re.search(rf"ranks 0, 2: waiting in all_reduce #\d+ {where}", lines[0])


def test_a_stopped_rank_that_hosts_the_store_is_reported_by_the_others(outcome: OutcomeOf) -> None:
    codes, lines = outcome(STORE_STOPS)
    assert codes == [None, 1, 1]
    assert len(lines) == 2, lines
    for rank, line in enumerate(lines, start=1):
        assert line.startswith(f"error: rank {rank}: ")
        assert "rank 0 on 127.0.0.1, which hosts" in line
        assert re.search(rf"rank {rank}: waiting in all_reduce #\d+ at step 3 in head", line)


def test_a_rank_stuck_outside_collectives_is_reported_with_its_line_and_exits(
    outcome: OutcomeOf,
) -> None:
    codes, lines = outcome(SLEEPS)
    assert codes == [1, 1, 1]
    assert len(lines) == 1, lines
    assert re.search(
        r"rank 1: at step 3 in data \(tests.trainer.test_watchdog:\d+\), after all_reduce #\d+",
        lines[0],
    )
    assert "ranks 0, 2: waiting in all_reduce" in lines[0]


def test_a_rank_that_skips_a_collective_is_reported_in_the_next_one(outcome: OutcomeOf) -> None:
    codes, lines = outcome(SKIPS)
    assert codes == [1, 1, 1]
    assert len(lines) == 1, lines
    assert re.search(r"rank 1: waiting in \w+ #\d+", lines[0])


def test_reading_longer_than_the_timeout_is_not_a_hang(outcome: OutcomeOf) -> None:
    assert outcome(READS_LONG) == ([0, 0], [])


def test_a_hang_in_a_group_with_torchs_default_timeout_is_detected(
    outcome: OutcomeOf,
) -> None:
    codes, lines = outcome(LONG_TIMEOUT)
    assert codes == [1, 1]
    assert len(lines) == 1, lines
    assert "rank 0: waiting in all_reduce #1 of mesh_class" in lines[0]


@pytest.mark.parametrize("case", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_collectives_of_ddp_and_fsdp_are_reported(case: Case, outcome: OutcomeOf) -> None:
    codes, lines = outcome(case)
    assert codes == [1, None]
    assert len(lines) == 1, lines
    assert re.search(
        r"rank 0: waiting in (all_reduce|all_gather|broadcast|reduce_scatter)", lines[0]
    )


def test_a_single_process_has_no_watchdog() -> None:
    threads = threading.enumerate()
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    with Watchdog(world, timeout_seconds=0.01, phases=Phase()) as watchdog:
        watchdog.at(1)
        assert threading.enumerate() == threads

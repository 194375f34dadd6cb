"""Ranks that hang, for real: every process ends by itself and one line says who and where."""

import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tests.ranks  # noqa: F401  (its fork server has torch imported)
from trainer.faults.watchdog import LostRankError, Watchdog
from trainer.world import World, open_world

_TIMEOUT = 3.0
_context = multiprocessing.get_context("forkserver")


class Phase:
    """What the watchdog asks for the phase."""

    current: str | None = None


# ---------------------------------------------------------------- what the ranks do


def _train(rank: int, watchdog: Watchdog, phase: Phase, act: Callable[[], None], who: int) -> None:
    """Five steps of one collective; rank `who` does `act` in step 3 before its collective."""
    for step in range(1, 6):
        watchdog.at(step)
        phase.current = "data"
        if rank == who and step == 3:
            act()
        phase.current = "head"
        dist.all_reduce(torch.ones(2))


def stop() -> None:
    time.sleep(1)  # for what the others see last of this rank
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def die() -> None:
    os._exit(9)


def rank_1_stops(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train(rank, watchdog, phase, stop, who=1)


def rank_0_stops(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train(rank, watchdog, phase, stop, who=0)


def rank_1_sleeps(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train(rank, watchdog, phase, sleep, who=1)


def rank_1_dies(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train(rank, watchdog, phase, die, who=1)


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
    # Made as device meshes make theirs: with torch's own timeout of half an hour.
    group = dist.new_group([0, 1], group_desc="mesh_class")
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(2), group=group)


def unrecorded(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    raise AssertionError("a run whose hangs nobody could name has begun")


def rank_1_stops_under_ddp(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train_network(rank, DistributedDataParallel(torch.nn.Linear(4, 4)))


def rank_1_stops_under_fsdp(rank: int, watchdog: Watchdog, phase: Phase) -> None:
    _train_network(rank, fully_shard(torch.nn.Linear(4, 4)))


def _train_network(rank: int, network: torch.nn.Module) -> None:
    for step in range(3):
        if rank == 1 and step == 2:
            stop()
        network(torch.ones(2, 4)).sum().backward()


# ---------------------------------------------------------------- running them


def _rank_main(
    rank: int, size: int, port: int, group_seconds: float, act: Callable[..., None], words: Path
) -> None:
    with words.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCH_FR_BUFFER_SIZE="0" if act is unrecorded else "256")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    phase = Phase()
    try:
        with open_world("cpu", timeout_seconds=_TIMEOUT) as world:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=group_seconds))
            with Watchdog(world, timeout_seconds=_TIMEOUT, phases=phase) as watchdog:
                act(rank, watchdog, phase)
    except LostRankError as error:
        if not error.is_reported:
            print(f"lost: {error}", file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def _ranks(size: int, act: Callable[..., None], folder: Path, group_seconds: float) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        _context.Process(
            target=_rank_main, args=(rank, size, port, group_seconds, act, folder / str(rank))
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(
    act: Callable[..., None],
    folder: Path,
    *,
    size: int = 3,
    stopped: int | None = None,
    group_seconds: float = 60,
) -> tuple[list[int | None], list[str]]:
    """Exit codes (None: still there) and all lines that any rank wrote."""
    with _ranks(size, act, folder, group_seconds) as ranks:
        for rank, process in enumerate(ranks):
            if rank != stopped:
                process.join(60)
        codes = [process.exitcode for process in ranks]
    words = [(folder / str(rank)).read_text() for rank in range(size)]
    return codes, "".join(words).splitlines()


# ---------------------------------------------------------------- the claims


def test_a_stopped_rank_is_named_in_one_line_and_the_others_end(tmp_path: Path) -> None:
    codes, lines = _run(rank_1_stops, tmp_path, stopped=1)
    assert codes == [1, None, 1]
    assert len(lines) == 1, lines
    assert re.match(r"error: rank [02]: train.timeout_seconds \(3\) is over: rank 1 ", lines[0])
    assert "rank 1 does not answer" in lines[0]
    assert "last seen at step 3 in data" in lines[0]
    # The line is the caller's, not one inside of torch.
    where = r"of head at step 3 \(tests.trainer.test_watchdog:\d+\) for \d+ s"
    assert re.search(rf"ranks 0, 2 wait in all_reduce #\d+ {where}", lines[0])


def test_when_the_rank_that_keeps_the_store_stops_the_others_name_it(tmp_path: Path) -> None:
    codes, lines = _run(rank_0_stops, tmp_path, stopped=0)
    assert codes == [None, 1, 1]
    assert len(lines) == 2, lines
    for rank, line in enumerate(lines, start=1):
        assert line.startswith(f"error: rank {rank}: ")
        assert "rank 0 on 127.0.0.1, which keeps" in line
        assert re.search(rf"rank {rank} waits in all_reduce #\d+ of head at step 3", line)


def test_a_rank_stuck_outside_of_collectives_is_named_with_its_line_and_ends(
    tmp_path: Path,
) -> None:
    codes, lines = _run(rank_1_sleeps, tmp_path)
    assert codes == [1, 1, 1]
    assert len(lines) == 1, lines
    assert re.search(
        r"rank 1 is at step 3 in data \(tests.trainer.test_watchdog:\d+\), after all_reduce #\d+",
        lines[0],
    )
    assert "ranks 0, 2 wait in all_reduce" in lines[0]


def test_a_rank_that_skips_a_collective_is_seen_to_wait_in_another(tmp_path: Path) -> None:
    codes, lines = _run(rank_1_skips, tmp_path)
    assert codes == [1, 1, 1]
    assert len(lines) == 1, lines
    assert re.search(r"rank 1 waits in \w+ #\d+", lines[0])


def test_reading_longer_than_the_timeout_is_no_hang(tmp_path: Path) -> None:
    assert _run(all_read_long, tmp_path, size=2) == ([0, 0], [])


def test_a_hang_in_a_group_with_torchs_long_timeout_ends_too(tmp_path: Path) -> None:
    codes, lines = _run(rank_1_sleeps_before_its_group, tmp_path, size=2)
    assert codes == [1, 1]
    assert len(lines) == 1, lines
    assert "rank 0 waits in all_reduce #1 of mesh_class" in lines[0]


@pytest.mark.parametrize("act", [rank_1_stops_under_ddp, rank_1_stops_under_fsdp])
def test_collectives_of_ddp_and_fsdp_are_seen(act: Callable[..., None], tmp_path: Path) -> None:
    codes, lines = _run(act, tmp_path, size=2, stopped=1)
    assert codes == [1, None]
    assert len(lines) == 1, lines
    assert re.search(r"rank 0 waits in (all_reduce|all_gather|broadcast|reduce_scatter)", lines[0])


def test_an_error_of_the_collective_before_the_timeout_is_explained(tmp_path: Path) -> None:
    codes, lines = _run(rank_1_stops, tmp_path, stopped=1, group_seconds=1)
    assert codes == [1, None, 1]
    assert len(lines) == 1, lines
    assert lines[0].startswith("lost: rank 1 does not answer")
    assert "ranks 0, 2 wait in all_reduce" in lines[0]


def test_a_rank_that_ends_ends_the_others_before_the_timeout(tmp_path: Path) -> None:
    codes, lines = _run(rank_1_dies, tmp_path)
    assert codes == [1, 9, 1]
    assert set(lines) == {"lost: another rank ended in the middle of a step"}


def test_without_the_flight_recorder_a_run_does_not_begin(tmp_path: Path) -> None:
    codes, lines = _run(unrecorded, tmp_path, size=2)
    assert codes == [1, 1]
    assert any("torch's flight recorder is off" in line for line in lines)


def test_in_a_world_of_one_there_is_no_watchdog() -> None:
    threads = threading.enumerate()
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    with Watchdog(world, timeout_seconds=0.01, phases=Phase()) as watchdog:
        watchdog.at(1)
        assert threading.enumerate() == threads

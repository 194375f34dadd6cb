"""Each second of a step is counted in exactly one phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from heads.collectives import all_gather_rows, all_reduce_sum, collective_hook
from tests.ranks import rank_world, run_on_ranks
from tests.trainer.training import each, started, take_steps
from trainer.telemetry.phases import Phases

CPU = torch.device("cpu")
SLEEP_SECONDS = 0.02
SLOW_SECONDS = 0.2


def test_the_time_of_an_inner_phase_is_not_added_to_the_outer_phase():
    phases = Phases(CPU)
    started = time.perf_counter()
    with phases("forward"):
        time.sleep(SLEEP_SECONDS)
        for _ in range(3):
            with phases("head"), phases("communication"):
                time.sleep(SLEEP_SECONDS)
        time.sleep(SLEEP_SECONDS)
    passed = time.perf_counter() - started
    taken = phases.take()
    assert taken.keys() == {"forward", "head", "communication"}
    assert taken["forward"] >= 2 * SLEEP_SECONDS
    assert taken["communication"] >= 3 * SLEEP_SECONDS
    assert sum(taken.values()) <= passed


def test_the_busy_time_excludes_collectives_and_parts_of_a_step_that_contain_them():
    phases = Phases(CPU)
    with phases("backward"):
        time.sleep(SLEEP_SECONDS)
    with phases("forward"):
        time.sleep(SLEEP_SECONDS)
        with phases.collective("all_gather"):
            time.sleep(SLEEP_SECONDS)
    with phases("evaluation"), phases("forward"):
        time.sleep(SLEEP_SECONDS)
    time.sleep(SLEEP_SECONDS)
    busy = phases.take_busy()
    taken = phases.take()
    assert busy >= taken["forward"] + SLEEP_SECONDS
    waited = sum(taken[name] for name in ("backward", "communication", "evaluation"))
    assert waited >= 3 * SLEEP_SECONDS
    with phases("backward"):
        time.sleep(SLEEP_SECONDS)
        assert phases.take_busy() < SLEEP_SECONDS


def busy_seconds_of_two_steps(shards: Path, case: dict[str, Any]) -> float:
    """Return this rank's busy time. Rank 1 takes `SLOW_SECONDS` longer in each forward pass."""
    task = started(shards, **case)
    if task.world.rank == 1:
        task.backbone.encoder.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
    with collective_hook(task.phases.collective):
        take_steps(task, 1)
        task.phases.take_busy()
        take_steps(task, 2, first=2)
        found = task.phases.take_busy()
    task.strategy.close()
    return found


def test_waiting_for_a_slow_rank_is_not_busy_time(glyphs: Path):
    cases: list[dict[str, Any]] = [
        {"train__strategy": {"kind": "ddp"}, "backbone__batch_norm": "sync"},
        {"train__strategy": {"kind": "fsdp"}, "backbone__batch_norm": "frozen"},
    ]
    arguments = [(glyphs, case) for case in cases]
    fast, slow = run_on_ranks(2, each, busy_seconds_of_two_steps, arguments)
    for case, mine, others in zip(cases, fast, slow, strict=True):
        assert mine < others - SLOW_SECONDS, case


def collectives_on_a_rank() -> tuple[list[tuple[str, str | None]], set[str]]:
    world, phases = rank_world(), Phases(CPU)
    recorded: list[tuple[str, str | None]] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        with phases.collective(name):
            recorded.append((name, phases.current))
            yield

    def elsewhere() -> None:
        all_reduce_sum(torch.ones(3), world.group)

    with phases("head"), collective_hook(around):
        all_reduce_sum(torch.ones(3), world.group)
        all_gather_rows(torch.ones(world.rank, 2), [0, 1], world.group)
        world.barrier()
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join(60)
    elsewhere()
    return recorded, {*phases.take()}


def test_collectives_on_the_thread_with_the_hook_are_counted_as_communication():
    names = ["all_reduce_sum", "all_gather", "barrier"]
    for recorded, taken in run_on_ranks(2, collectives_on_a_rank):
        assert recorded == [(name, "communication") for name in names]
        assert taken == {"head", "communication"}

"""The exchange in each step: signals, bad samples and busy times of all ranks."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer.agreement
import trainer.train
from data.loading.batch import Batch, Substitute
from heads.collectives import all_reduce_sum
from tests.ranks import RankError, rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import losses
from trainer.__main__ import main
from trainer.agreement import Agreed, Agreement, agree
from trainer.world import is_lost_rank

EMPTY = torch.zeros(0, dtype=torch.int64)


def batch_with_bad(*indices: int) -> Batch:
    substitutes = tuple(Substitute(index, 0, "damaged") for index in indices)
    return Batch({}, EMPTY, EMPTY, substitutes=substitutes)


def agreed_on() -> Agreed:
    world = rank_world()
    bad = [10 * world.rank, -5][: world.rank]  # hashes of a stream may be negative
    stop = "SIGTERM" if world.rank == 2 else None
    return agree(world, stop=stop, batch=batch_with_bad(*bad), busy_seconds=float(world.rank))


def test_all_ranks_agree() -> None:
    expected = Agreed("SIGTERM", [10, 20, -5], [0.0, 1.0, 2.0])
    assert run_on_ranks(3, agreed_on) == [expected] * 3


def agreed_during_other_collectives() -> list[tuple[float, Agreed]]:
    """Rank 0 starts each exchange before another collective, and rank 1 after it."""
    world, found = rank_world(), []
    with Agreement(world) as agreement:
        for step in range(20):
            stop = "SIGUSR1" if step == 7 and world.rank else None

            def start(step: int = step, stop: str | None = stop) -> Any:
                batch = batch_with_bad(*[step] * world.rank)
                return agreement.start(stop=stop, batch=batch, busy_seconds=0.0)

            exchange = start() if world.rank == 0 else None
            total = float(all_reduce_sum(torch.tensor([float(step)]), dist.group.WORLD))
            found.append((total, (exchange or start())()))
            agreement.check()
    return found


def test_an_exchange_runs_at_the_same_time_as_other_collectives() -> None:
    expected = [
        (2.0 * step, Agreed("SIGUSR1" if step == 7 else None, [step], [0.0, 0.0]))
        for step in range(20)
    ]
    assert run_on_ranks(2, agreed_during_other_collectives) == [expected] * 2


def left_before_the_message_is_received() -> bool:
    """Rank 0 starts to receive the last message only after both ranks could have left."""
    world = rank_world()
    with Agreement(world) as agreement:
        if world.rank == 1:
            time.sleep(0.5)  # the callback is added before the exchange ends
        wait = agreement.start(stop=None, batch=batch_with_bad(), busy_seconds=0.0)
        if world.rank == 0:
            agreement._running[0].add_done_callback(lambda _: time.sleep(0.5))
        wait()
    return True


def test_the_last_message_is_sent_and_received_before_a_rank_leaves() -> None:
    assert run_on_ranks(2, left_before_the_message_is_received) == [True, True]


def poll(agreement: Agreement) -> None:
    while True:
        agreement.check()
        time.sleep(0.001)


def check_until_lost(lost: int, dies_early: bool) -> None:
    """In the second step, rank `lost` is killed before or after the exchange. The other ranks never
    end the step."""
    world = rank_world()
    agreement = Agreement(world)

    def start() -> Any:
        return agreement.start(stop=None, batch=batch_with_bad(), busy_seconds=0.0)

    start()()
    if world.rank == lost and dies_early:
        os.kill(os.getpid(), signal.SIGKILL)
    start()
    if world.rank == lost:
        time.sleep(0.5)  # the exchange completes
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        poll(agreement)
    assert is_lost_rank(error.value)
    if world.rank == 1:  # rank 0 detects this, too
        os._exit(0)


@pytest.mark.parametrize("dies_early", [True, False])
def test_every_rank_detects_a_lost_rank_during_a_step(dies_early: bool) -> None:
    # Rank 0 is connected to rank 1, which is connected to rank 2. An error on rank 0 would be
    # raised first.
    with pytest.raises(RankError, match="rank 1 died"):
        run_on_ranks(3, check_until_lost, 2, dies_early)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_step_does_not_wait_for_its_exchange(synchronous, glyphs, tmp_path, monkeypatch) -> None:
    """Here, the exchange of each step completes only after the step has been launched."""
    launched = threading.Semaphore(0)
    original = agree, trainer.train.take_step

    def late(*args: Any, **options: Any) -> Agreed:
        assert launched.acquire(timeout=60)
        return original[0](*args, **options)

    def take_step(*args: Any, **options: Any) -> Any:
        taken = original[1](*args, **options)
        launched.release()
        return taken

    monkeypatch.setattr(trainer.agreement, "agree", late)
    monkeypatch.setattr(trainer.train, "take_step", take_step)
    run = tmp_path / "run"
    options = {"train__synchronous": synchronous, "telemetry": {"log_every": 1}}
    assert main([str(write_recipe(tmp_path, glyph_recipe(glyphs, run, **options)))]) == 0
    assert sorted(losses(run)) == [1, 2, 3, 4]


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_signal_stops_a_run_after_the_step_that_follows_it(
    synchronous, glyphs, tmp_path, monkeypatch
) -> None:
    """The signal arrives during step 2, so the exchange of step 3 contains it. The run saves step 3
    and does not evaluate, although an evaluation is due."""
    original = trainer.train.take_step

    def take_step(*args: Any, step: int, **options: Any) -> Any:
        taken = original(*args, step=step, **options)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return taken

    monkeypatch.setattr(trainer.train, "take_step", take_step)
    run = tmp_path / "run"
    options = {"telemetry": {"log_every": 1}, "evaluation": {"every": {"steps": 3}}}
    recipe = glyph_recipe(
        glyphs, run, train__synchronous=synchronous, train__duration={"steps": 8}, **options
    )
    assert main([str(write_recipe(tmp_path, recipe))]) == 75
    assert sorted(losses(run)) == [1, 2, 3]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (run / "evaluations").exists()

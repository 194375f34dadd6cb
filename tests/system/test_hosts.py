"""Runs over several hosts, each a network namespace: trained together, cut off, lost, come back."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.system.hosts import Host, hosts
from tests.system.processes import write_recipe
from tests.system.runs import Launched, kill, last_step, launched, losses

_PORT = 29517


def options(host: Host, first: Host, *more: str, nodes: str = "2", conf: str = "") -> list[str]:
    """What `kway train` is told on `host`, where all meet on `first`."""
    return [
        *("--nnodes", nodes, "--rdzv-endpoint", f"{first.address}:{_PORT}"),
        *("--rdzv-conf", f"is_host={int(host is first)},join_timeout=120{conf}"),
        *("--local-addr", host.address, *more),
    ]


def start(stack: ExitStack, recipe: Path, run: Path, host: Host, given: list[str]) -> Launched:
    log = run.with_name(f"{host.name}.log")
    training = launched(recipe, run, *given, num=1, before=host.inside, log=log)
    return stack.enter_context(training)


def recipe_of(glyphs: Path, folder: Path, *, steps: int) -> Path:
    recipe = glyph_recipe(
        glyphs,
        folder / "unused",
        train__duration={"steps": steps},
        checkpoint={"every": {"steps": 5}},
        telemetry={"log_every": 1},
    )
    return write_recipe(folder, recipe)


def stopped(both: list[Launched], run: Path) -> None:
    """Stop them by a signal to one; every step up to the last stands in the log once."""
    both[1].process.send_signal(signal.SIGTERM)
    assert [training.end() for training in both] == [75, 75], [t.words for t in both]
    assert sorted(losses(run)) == list(range(1, last_step(run) + 1))


@pytest.mark.slow
def test_two_hosts_train_to_the_losses_of_one(glyphs, tmp_path):
    recipe = recipe_of(glyphs, tmp_path, steps=6)
    with launched(recipe, tmp_path / "one", num=2) as alone:
        assert alone.end() == 0, alone.words
    with hosts(2) as (first, second), ExitStack() as stack:
        run = tmp_path / "two"
        both = [start(stack, recipe, run, h, options(h, first)) for h in (second, first)]
        assert [training.end() for training in both] == [0, 0], [t.words for t in both]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.mark.slow
def test_a_host_that_is_cut_off_for_seconds_goes_on(glyphs, tmp_path):
    recipe, run = recipe_of(glyphs, tmp_path, steps=100_000), tmp_path / "run"
    with hosts(2) as (first, second), ExitStack() as stack:
        both = [start(stack, recipe, run, h, options(h, first)) for h in (first, second)]
        both[0].wait_for_step(5)
        second.cut()
        time.sleep(3)
        stood = last_step(run)
        time.sleep(1)
        assert last_step(run) == stood
        second.join()
        both[0].wait_for_step(stood + 5)
        stopped(both, run)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_host_that_dies_and_is_started_anew_joins_again(nodes, glyphs, tmp_path):
    recipe, run = recipe_of(glyphs, tmp_path, steps=100_000), tmp_path / "run"
    more = {"nodes": nodes, "conf": ",last_call_timeout=3,keep_alive_interval=1"}
    with hosts(2) as (first, second), ExitStack() as stack:
        staying, dying = (
            start(stack, recipe, run, h, options(h, first, "--max-restarts", "3", **more))
            for h in (first, second)
        )
        staying.wait_for_step(20)
        kill(dying.process)
        if nodes == "1:2":  # the other goes on alone
            staying.wait_for(lambda: " 1 x cpu" in staying.words, "a world of one")
            staying.wait_for_step(last_step(run) + 5)
        anew = start(stack, recipe, run, second, options(second, first, **more))

        def both_train() -> bool:
            return (staying.words + anew.words).count(" 2 x cpu") == 2

        staying.wait_for(both_train, "a world of two again")
        staying.wait_for_step(last_step(run) + 5)
        stopped([staying, anew], run)
    assert "restart 1 of 3" in staying.words


@pytest.mark.slow
def test_without_the_host_of_the_meeting_the_other_ends_with_a_line(glyphs, tmp_path):
    recipe = recipe_of(glyphs, tmp_path, steps=100_000)
    with hosts(2) as (first, second), ExitStack() as stack:
        both = [
            start(stack, recipe, tmp_path / "run", h, options(h, first, "--max-restarts", "3"))
            for h in (first, second)
        ]
        both[0].wait_for_step(5)
        kill(both[0].process)
        assert both[1].end() == 1
        assert f"the rendezvous at {first.address}:{_PORT} is lost" in both[1].words
        assert "Traceback" not in both[1].words


@pytest.mark.slow
def test_a_preempted_host_has_all_three_save(glyphs, tmp_path):
    recipe = recipe_of(glyphs, tmp_path, steps=100_000)
    with hosts(3) as machines, ExitStack() as stack:
        given = [options(h, machines[0], nodes="3") for h in machines]
        run = tmp_path / "run"
        all_three = [
            start(stack, recipe, run, host, words)
            for host, words in zip(machines, given, strict=True)
        ]
        all_three[0].wait_for_step(7)
        all_three[2].process.send_signal(signal.SIGTERM)
        assert [t.end() for t in all_three] == [75, 75, 75], [t.words for t in all_three]
        saved = max((run / "checkpoints").iterdir()).name
        assert saved == f"step-{last_step(run):08d}"

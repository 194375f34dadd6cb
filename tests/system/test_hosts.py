"""Runs on several hosts (network namespaces), of which one is lost and restarted."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.conftest import logging_recipe
from tests.system.hosts import Host, hosts
from tests.system.runs import Launched, kill, last_step, launched, losses

_PORT = 29517


def options_of(host: Host, first: Host, *more: str, nodes: str = "2", conf: str = "") -> list[str]:
    """Return the options of `kway train` on `host`, with the rendezvous on `first`."""
    return [
        *("--nnodes", nodes, "--rdzv-endpoint", f"{first.address}:{_PORT}"),
        *("--rdzv-conf", f"is_host={int(host is first)},join_timeout=120{conf}"),
        *("--local-addr", host.address, *more),
    ]


def start(stack: ExitStack, recipe: Path, run: Path, host: Host, options: list[str]) -> Launched:
    log = run.with_name(f"{host.name}.log")
    training = launched(recipe, run, *options, num=1, before=host.inside, log=log)
    return stack.enter_context(training)


@pytest.mark.slow
def test_a_run_on_two_hosts_has_the_same_losses_as_on_one(glyphs, tmp_path):
    recipe = logging_recipe(glyphs, tmp_path, steps=6, save_every=5)
    with launched(recipe, tmp_path / "one", num=2) as alone:
        assert alone.end() == 0, alone.output
    with hosts(2) as (first, second), ExitStack() as stack:
        run = tmp_path / "two"
        both = [start(stack, recipe, run, h, options_of(h, first)) for h in (second, first)]
        assert [training.end() for training in both] == [0, 0], [t.output for t in both]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_restarted_host_rejoins_the_run(nodes, glyphs, tmp_path):
    recipe = logging_recipe(glyphs, tmp_path, steps=100_000, save_every=5)
    run = tmp_path / "run"
    more = {"nodes": nodes, "conf": ",last_call_timeout=3,keep_alive_interval=1"}
    with hosts(2) as (first, second), ExitStack() as stack:
        surviving, dying = (
            start(stack, recipe, run, h, options_of(h, first, "--max-restarts", "3", **more))
            for h in (first, second)
        )
        surviving.wait_for_step(20)
        kill(dying.process)
        if nodes == "1:2":  # the other host continues alone
            surviving.wait_for(lambda: " 1 x cpu" in surviving.output, "a world of one")
            surviving.wait_for_step(last_step(run) + 5)
        restarted = start(stack, recipe, run, second, options_of(second, first, **more))

        def both_train() -> bool:
            return (surviving.output + restarted.output).count(" 2 x cpu") == 2

        surviving.wait_for(both_train, "a world of two again")
        surviving.wait_for_step(last_step(run) + 5)
        restarted.process.send_signal(signal.SIGTERM)
        both = [surviving, restarted]
        assert [training.end() for training in both] == [75, 75], [t.output for t in both]
    assert sorted(losses(run)) == list(range(1, last_step(run) + 1))
    assert "restart 1 of 3" in surviving.output

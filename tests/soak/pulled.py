"""Runs on two hosts, one of which is disconnected or killed and restarted."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.shards import glyph_recipe, glyph_shards
from tests.soak.trials import Trial
from tests.system.hosts import Host, hosts
from tests.system.processes import write_recipe
from tests.system.runs import Launched, kill, last_step, launched, losses

_PORT = 29518
_NUM_STEPS = 300


def host_runs(folder: Path, count: int, seed: int) -> Iterator[Trial]:
    """Run `count` trials on two hosts. The second host is disconnected, or its launcher is killed
    and restarted.
    """
    folder.mkdir(parents=True)
    shards, rng = glyph_shards(folder), random.Random(seed)
    for index in range(count):
        recipe = glyph_recipe(
            shards,
            folder / "unused",
            train__duration={"steps": _NUM_STEPS},
            checkpoint={"every": {"steps": 5}},
            telemetry={"log_every": 1},
        )
        path, run = write_recipe(folder, recipe), folder / f"run-{index}"
        what = rng.choice(["disconnected for 3 s", "killed and restarted"])
        with hosts(2) as machines, ExitStack() as stack:
            yield _trial(stack, path, run, machines, what, rng.randint(5, 60))


def _trial(
    stack: ExitStack, recipe: Path, run: Path, machines: list[Host], what: str, at: int
) -> Trial:
    first, second = machines
    surviving, other = (_start(stack, recipe, run, host, first) for host in machines)
    surviving.wait_for_step(at)
    step, failed_at = last_step(run), time.monotonic()
    if what.startswith("disconnected"):
        second.disconnect()
        time.sleep(3)
        second.reconnect()
    else:
        kill(other.process)
        other = _start(stack, recipe, run, second, first)
    surviving.wait_for(lambda: last_step(run) > step + 1, "the next step")
    seconds = time.monotonic() - failed_at
    codes = [surviving.end(), other.end()]
    complete = sorted(losses(run)) == list(range(1, _NUM_STEPS + 1))
    found = f"codes {codes}, {'each step once' if complete else 'missing or duplicate steps'}"
    return Trial(f"{what} at step {step}", codes == [0, 0] and complete, found, seconds)


def _start(stack: ExitStack, recipe: Path, run: Path, host: Host, first: Host) -> Launched:
    options = [
        *("--nnodes", "2", "--rdzv-endpoint", f"{first.address}:{_PORT}", "--max-restarts", "3"),
        *("--rdzv-conf", f"is_host={int(host is first)},keep_alive_interval=1"),
        *("--local-addr", host.address),
    ]
    log = run.with_name(f"{run.name}-{host.name}.log")
    training = launched(recipe, run, *options, num=1, before=host.inside, log=log)
    return stack.enter_context(training)

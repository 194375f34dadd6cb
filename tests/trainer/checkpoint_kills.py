"""Kills processes while they save, either at a random time or before each of their file operations.

`kill_and_resume(root, …, seed=, count=)` kills at random times. The kernel keeps the data that a
killed process has written, so this does not simulate a power failure.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.ranks import RankError, rank_world, run_on_ranks
from tests.trainer.checkpoint_runs import config, entries_at, verify_newest
from trainer.checkpoints import CheckpointWriter, find_checkpoint

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}
# Parts of the errors that follow when a rank is killed.
LOST = ("died", "gloo", "Connection closed")


def kill_and_resume(root: Path, world_size: int, *, seed: int, count: int) -> list[int]:
    """Repeat `count` times: resume from the newest checkpoint, save repeatedly and kill a rank.

    Returns the newest step after each kill. Raises AssertionError if the newest committed
    checkpoint is incomplete, or is older than one that was reported as committed.
    """
    draw, newest = Random(seed), []
    for _ in range(count):
        run = (root, draw.randrange(world_size), draw.uniform(0.0, 0.3), draw.random() < 0.7)
        _run_until_killed(world_size, save_until_killed, *run)
        step, rejected = verify_newest(root)
        assert rejected == [], (run, rejected)
        assert (step or 0) >= last_reported(root), run
        newest.append(step or 0)
    return newest


def last_reported(root: Path) -> int:
    """Return the newest step that was reported as committed. The file may be empty if the rank was
    killed before it wrote the first step."""
    reported = root / "reported"
    steps = reported.read_text().split() if reported.exists() else []
    return int(steps[-1]) if steps else 0


def save_until_killed(root: Path, rank: int, seconds: float, in_background: bool) -> None:
    """Save one step after another. `rank` kills itself after `seconds`."""
    world = rank_world()
    checkpoint, _ = find_checkpoint(root, world)
    start = checkpoint.step if checkpoint else 0
    settings = config(in_background=in_background, keep_last=2)
    with CheckpointWriter(root, settings, world, start_step=start, print_line=_discard) as writer:
        if world.rank == rank:
            threading.Thread(target=_kill_after, args=(seconds,), daemon=True).start()
        for step in range(start + 1, start + 10**6):
            writer.save(entries_at(step, world), {"step": step})
            for folder in writer.committed() if world.is_main else ():
                with (root / "reported").open("a") as file:
                    file.write(f"{int(folder.name.removeprefix('step-'))}\n")


def end_before_change(root: Path, number: int, steps: list[int], start_step: int) -> bool:
    """Save `steps`, but kill this process before the operation with index `number` that opens,
    renames, creates or removes a file under `root`. Returns True if there are fewer operations.
    """
    remaining = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if event in CHANGES and str(arguments[0]).startswith(str(root)):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    settings = config(in_background=False, keep_last=1)
    with CheckpointWriter(root, settings, rank_world(), start_step=start_step) as writer:
        for step in steps:
            writer.save(entries_at(step, rank_world()), {"step": step})
    return True


def ended_before_change(root: Path, number: int, steps: list[int], start_step: int) -> bool:
    """Return whether `end_before_change` killed its process before all steps were saved."""
    return _run_until_killed(1, end_before_change, root, number, steps, start_step)


def _run_until_killed(world_size: int, function: Any, *arguments: Any) -> bool:
    try:
        run_on_ranks(world_size, function, *arguments)
    except RankError as error:
        if not any(word in str(error) for word in LOST):
            raise
        return True
    return False


def _kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _discard(_: str) -> None:
    return

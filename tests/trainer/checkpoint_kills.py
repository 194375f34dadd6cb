"""Ends processes while they save: at a random instant, or before each of their file operations.

`kill_and_resume(root, …, seed=, count=)` is the random one; `make soak` runs it with a larger
count. What a process that is gone has written stays in the kernel, so this is no loss of power.
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
from tests.trainer.checkpoint_runs import config, entries_at, newest_is_whole
from trainer.checkpoints import CheckpointWriter, find_checkpoint

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}
# What the ranks say when one of them is gone.
LOST = ("died", "gloo", "Connection closed")


def kill_and_resume(root: Path, world_size: int, *, seed: int, count: int) -> list[int]:
    """`count` times: ranks go on from the newest checkpoint and save again and again, one of them
    is killed, and the newest committed checkpoint must be whole.

    Returns the newest step after each kill. Raises AssertionError where it is not whole, or is
    older than one that was told to be committed.
    """
    draw, newest = Random(seed), []
    for _ in range(count):
        run = (root, draw.randrange(world_size), draw.uniform(0.0, 0.3), draw.random() < 0.7)
        _run_until_killed(world_size, save_until_killed, *run)
        step, refused = newest_is_whole(root)
        assert refused == [], (run, refused)
        assert (step or 0) >= last_told(root), run
        newest.append(step or 0)
    return newest


def last_told(root: Path) -> int:
    """The newest step that was told to be committed; a kill can come before the first is written
    into the file that was made for it."""
    told = root / "told"
    steps = told.read_text().split() if told.exists() else []
    return int(steps[-1]) if steps else 0


def save_until_killed(root: Path, rank: int, seconds: float, in_background: bool) -> None:
    """Save the steps after the newest, for ever; `rank` kills itself after so many seconds."""
    world = rank_world()
    checkpoint, _ = find_checkpoint(root, world)
    start = checkpoint.step if checkpoint else 0
    settings = config(in_background=in_background, keep_last=2)
    with CheckpointWriter(root, settings, world, start_step=start, print_line=_nothing) as writer:
        if world.rank == rank:
            threading.Thread(target=_kill_after, args=(seconds,), daemon=True).start()
        for step in range(start + 1, start + 10**6):
            writer.save(entries_at(step, world), {"step": step})
            for folder in writer.committed() if world.is_main else ():
                with (root / "told").open("a") as file:
                    file.write(f"{int(folder.name.removeprefix('step-'))}\n")


def end_before_change(root: Path, number: int, steps: list[int], start_step: int) -> bool:
    """Save these steps, and end before the `number`-th time that a file under `root` is opened,
    renamed, made or removed; True where there are fewer."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES and str(arguments[0]).startswith(str(root)):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    settings = config(in_background=False, keep_last=1)
    with CheckpointWriter(root, settings, rank_world(), start_step=start_step) as writer:
        for step in steps:
            writer.save(entries_at(step, rank_world()), {"step": step})
    return True


def ended_before_change(root: Path, number: int, steps: list[int], start_step: int) -> bool:
    """Whether such a process, on its own, came to its end before it was done."""
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


def _nothing(_: str) -> None:
    return

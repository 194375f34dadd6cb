"""Checkpoints that are damaged after a save, and processes that are killed during a save."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.ranks import run_on_ranks
from tests.soak.trials import Trial
from tests.trainer.checkpoint_kills import kill_and_resume
from tests.trainer.checkpoint_mutations import damage_and_resume
from tests.trainer.checkpoint_runs import save_steps

_PER_TRIAL = 50


def damaged(folder: Path, count: int, seed: int) -> Iterator[Trial]:
    """Apply `count` mutations to a checkpoint of two ranks. Each resume must load the older
    checkpoint.
    """
    root, work = folder / "root", folder / "work"
    work.mkdir(parents=True)
    run_on_ranks(2, save_steps, root, [1, 2])
    for begin in range(0, count, _PER_TRIAL):
        size = min(_PER_TRIAL, count - begin)
        damage = partial(damage_and_resume, root, work, seed=seed + begin, count=size)
        yield _run(f"{size} mutations", lambda damage=damage: f"{damage().total()} rejected")


def killed(folder: Path, count: int, seed: int) -> Iterator[Trial]:
    """Kill `count` saves on one rank, and as many on two ranks, at random times."""
    for ranks in (1, 2):
        root = folder / f"{ranks}-ranks"
        root.mkdir(parents=True)
        kill = partial(kill_and_resume, root, ranks, seed=seed, count=count)
        yield _run(
            f"{count} kills, {ranks} ranks", lambda kill=kill: f"newest complete: step {kill()[-1]}"
        )


def _run(what: str, trial: Callable[[], str]) -> Trial:
    try:
        return Trial(what, True, trial(), None)
    except AssertionError as error:
        return Trial(what, False, " ".join(str(error).split())[:300], None)

"""`python -m tests.soak [KIND=COUNT …]`: full counts of the faults, a line a trial, then a page.

Without kinds all of them run in full, for over half an hour; exit code 1 where a trial failed.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak.checkpoints import damaged, killed
from tests.soak.disturbed import draw, finish, lay, strike
from tests.soak.pulled import host_runs
from tests.soak.quiet import quiet_runs
from tests.soak.strategies import alike, between
from tests.soak.trials import Summary, Trial, ran, write_page

_STEPS_A_TRIAL = 30


def _struck(
    number: signal.Signals, ranks: int, folder: Path, count: int, seed: int
) -> Iterator[Trial]:
    course = lay(folder, num_steps=_STEPS_A_TRIAL * count, ranks=ranks)
    for index, plan in enumerate(draw(number, count, seed)):
        yield strike(course, plan, index)
    yield finish(course)


@dataclass(frozen=True)
class Kind:
    """A kind of trouble: its full count, what a trial of it is, and the trials in a folder."""

    count: int
    meaning: str
    trials: Callable[[Path, int, int], Iterator[Trial]]


# What a soak is made of: the place for further kinds of trouble.
KINDS: dict[str, Kind] = {
    "kill": Kind(
        30,
        "SIGKILL to the launcher or to one of three ranks at random instants, start-up included; "
        "the last trial holds the run against an undisturbed one: the same losses, the same bits "
        "of all weights, every sample once an epoch, no process left after 1 s",
        lambda *given: _struck(signal.SIGKILL, 3, *given),
    ),
    "stop": Kind(
        30,
        "SIGTERM likewise, on two ranks",
        lambda *given: _struck(signal.SIGTERM, 2, *given),
    ),
    "quiet": Kind(
        50,
        "runs of 1, 2 and 4 ranks that nothing disturbs exit with 0",
        lambda folder, count, _seed: quiet_runs(folder, count),
    ),
    "hosts": Kind(
        6, "of two hosts one is cut off, or dies and comes back; the run ends right", host_runs
    ),
    "damage": Kind(
        200, "mutations of a saved checkpoint, 50 a trial: each is refused by name", damaged
    ),
    "killed-saves": Kind(
        20,
        "kills at random instants of a save, on 1 and on 2 ranks: the newest committed checkpoint "
        "is whole after each",
        killed,
    ),
    "strategies": Kind(
        42, "losses, weights and moments under every strategy are those of one process", alike
    ),
    "between": Kind(
        14, "a checkpoint of each strategy goes on under all of them, at other world sizes", between
    ),
}


def main() -> int:
    options = _options()
    counts = dict(options.kinds) or {name: kind.count for name, kind in KINDS.items()}
    summaries: list[Summary] = []
    with tempfile.TemporaryDirectory(prefix="kway-soak-", dir=options.folder) as folder:
        for name, count in counts.items():
            trials = KINDS[name].trials(Path(folder) / name, count, options.seed)
            summaries.append(ran(name, KINDS[name].meaning, trials))
            if options.out:
                machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
                write_page(options.out, summaries, seed=options.seed, machine=machine)
    return 0 if all(summary.sound for summary in summaries) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND=COUNT", help=" ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="markdown file for the table and the log")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary one")
    return parser.parse_args()


def _kind(text: str) -> tuple[str, int]:
    kind, _, count = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind} is none of {', '.join(KINDS)}")
    return kind, int(count) if count else KINDS[kind].count


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())

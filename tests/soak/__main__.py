"""`python -m tests.soak [KIND=COUNT …]`: the full counts of the faults, a line a trial and a table.

Without kinds all of them run in full, for hours; exit code 1 where a trial failed.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.soak.checkpoints import damaged, killed
from tests.soak.disturbed import draw, finish, lay, strike
from tests.soak.pulled import host_runs
from tests.soak.quiet import quiet_runs
from tests.soak.strategies import alike, between
from tests.soak.trials import Summary, Trial, ran, write_table

_STEPS_A_TRIAL = 30


def _struck(
    number: signal.Signals, ranks: int, folder: Path, count: int, seed: int
) -> Iterator[Trial]:
    course = lay(folder, num_steps=_STEPS_A_TRIAL * count, ranks=ranks)
    for index, plan in enumerate(draw(number, count, seed)):
        yield strike(course, plan, index)
    yield finish(course)


# What a soak is made of, and its full counts: the place for further kinds of trouble.
KINDS: dict[str, tuple[int, Callable[[Path, int, int], Iterator[Trial]]]] = {
    "kill": (30, lambda *given: _struck(signal.SIGKILL, 3, *given)),
    "stop": (30, lambda *given: _struck(signal.SIGTERM, 2, *given)),
    "quiet": (50, lambda folder, count, _seed: quiet_runs(folder, count)),
    "hosts": (6, host_runs),
    "damage": (200, damaged),
    "killed-saves": (20, killed),
    "strategies": (42, alike),
    "between": (14, between),
}


def main() -> int:
    options = _options()
    counts = dict(options.kinds) or {kind: count for kind, (count, _) in KINDS.items()}
    summaries: list[Summary] = []
    with tempfile.TemporaryDirectory(prefix="kway-soak-", dir=options.folder) as folder:
        for kind, count in counts.items():
            trials = KINDS[kind][1](Path(folder) / kind, count, options.seed)
            summaries.append(ran(kind, trials))
            if options.out:
                machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
                write_table(options.out, summaries, seed=options.seed, machine=machine)
    return 0 if all(summary.sound for summary in summaries) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND=COUNT", help=" ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="markdown file for the table")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary one")
    return parser.parse_args()


def _kind(text: str) -> tuple[str, int]:
    kind, _, count = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind} is none of {', '.join(KINDS)}")
    return kind, int(count) if count else KINDS[kind][0]


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())

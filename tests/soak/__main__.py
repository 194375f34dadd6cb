"""`python -m tests.soak [KIND=COUNT …]`: training runs that are disturbed at random times.

Prints a line per trial. By default, every kind runs its full count, which takes about 20 minutes.
The exit code is 1 if any trial fails.
"""

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.soak.disturbed import Trial, disturb, draw, finish, prepare

_STEPS_PER_TRIAL = 30


@dataclass(frozen=True)
class Kind:
    """A kind of trial: the full number of trials, what they check, and how to run them."""

    count: int
    meaning: str
    trials: Callable[[Path, int, int], Iterator[Trial]]


def _disturbed(
    number: signal.Signals, ranks: int, deferred: bool, folder: Path, count: int, seed: int
) -> Iterator[Trial]:
    num_steps = _STEPS_PER_TRIAL * count
    experiment = prepare(folder, num_steps=num_steps, ranks=ranks, deferred=deferred)
    for index, plan in enumerate(draw(number, count, seed)):
        yield disturb(experiment, plan, index)
    yield finish(experiment)


KINDS: dict[str, Kind] = {
    "kill": Kind(
        30,
        "the launcher or one of three ranks is killed with SIGKILL at a random time, possibly "
        "during startup. After 1 s, no killed or orphaned process is left. The last trial "
        "completes the run and compares it with an undisturbed run: the losses are the same, the "
        "weights are bit-identical, and every sample is used once per epoch",
        partial(_disturbed, signal.SIGKILL, 3, False),
    ),
    "stop": Kind(
        30,
        "the same as `kill`, but with SIGTERM and two ranks",
        partial(_disturbed, signal.SIGTERM, 2, False),
    ),
    "kill-deferred": Kind(
        10,
        "the same as `kill`, but the results of each step are read one step late, as on GPUs",
        partial(_disturbed, signal.SIGKILL, 3, True),
    ),
    "stop-deferred": Kind(
        10,
        "the same as `stop`, but the results of each step are read one step late, as on GPUs",
        partial(_disturbed, signal.SIGTERM, 2, True),
    ),
}


def main() -> int:
    options = _options()
    counts = dict(options.kinds) or {name: kind.count for name, kind in KINDS.items()}
    rows, passed = [], True
    with tempfile.TemporaryDirectory(prefix="kway-soak-", dir=options.folder) as folder:
        for name, count in counts.items():
            trials = []
            for trial in KINDS[name].trials(Path(folder) / name, count, options.seed):
                mark = "ok  " if trial.passed else "FAIL"
                print(f"{time.strftime('%H:%M:%S')} {mark} {name}: {trial}")
                trials.append(trial)
            rows.append(_row(name, trials))
            passed &= all(trial.passed for trial in trials)
            if options.out:
                _write_page(options.out, rows, options.seed)
    return 0 if passed else 1


def _row(name: str, trials: list[Trial]) -> str:
    num_passed = sum(trial.passed for trial in trials)
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    took = "-"
    if seconds:
        took = f"median {statistics.median(seconds):.1f} s, maximum {max(seconds):.1f} s"
    return f"| `{name}`: {KINDS[name].meaning} | {num_passed} of {len(trials)} | {took} |"


def _write_page(path: Path, rows: list[str], seed: int) -> None:
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    lines = [
        "# Soak test",
        "",
        "`make soak` disturbs training runs at random times. It wrote this page",
        f"(seed {seed}, {time.strftime('%Y-%m-%d')}, {machine}).",
        "",
        "| trials | passed | time from the fault to the next step |",
        "| --- | --- | --- |",
        *rows,
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND=COUNT", help=" ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument(
        "--folder", type=Path, help="folder for the runs; default: a temporary folder"
    )
    return parser.parse_args()


def _kind(text: str) -> tuple[str, int]:
    kind, _, count = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind} is not one of {', '.join(KINDS)}")
    return kind, int(count) if count else KINDS[kind].count


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())

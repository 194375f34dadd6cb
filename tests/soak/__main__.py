"""`python -m tests.soak [KIND=COUNT …]`: repeated fault-injection trials, one line per trial.

By default, every kind runs its full count, which takes over half an hour in total. The exit code is
1 if any trial fails.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.soak.checkpoints import damaged, killed
from tests.soak.disturbed import disturb, draw, finish, prepare
from tests.soak.faults import fault_runs
from tests.soak.pulled import host_runs
from tests.soak.quiet import quiet_runs
from tests.soak.strategies import between, same_results
from tests.soak.trials import Summary, Trial, run_trials, write_page

_STEPS_PER_TRIAL = 30


def _disturbed(
    number: signal.Signals, ranks: int, deferred: bool, folder: Path, count: int, seed: int
) -> Iterator[Trial]:
    num_steps = _STEPS_PER_TRIAL * count
    experiment = prepare(folder, num_steps=num_steps, ranks=ranks, deferred=deferred)
    for index, plan in enumerate(draw(number, count, seed)):
        yield disturb(experiment, plan, index)
    yield finish(experiment)


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the full number of trials, what they check, and how to run them."""

    count: int
    meaning: str
    trials: Callable[[Path, int, int], Iterator[Trial]]


# All kinds of faults. Add new ones here.
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
    "faults": Kind(
        6,
        "on 2 ranks, the features of one rank become NaN, or its float16 gradients overflow. A run "
        "that reads results one step late has the same losses and skips the same steps as a "
        "synchronous run. For NaN, the message of both runs names the step and the rank",
        fault_runs,
    ),
    "quiet": Kind(
        50,
        "undisturbed runs on 1, 2 and 4 ranks exit with code 0",
        lambda folder, count, _seed: quiet_runs(folder, count),
    ),
    "hosts": Kind(
        6,
        "one of two hosts is disconnected for 3 s, or its launcher is killed and started again. "
        "In both cases, the run completes and records each step once",
        host_runs,
    ),
    "damage": Kind(
        200,
        "each trial damages a saved checkpoint in 50 ways, one at a time. Every damaged checkpoint "
        "is rejected",
        damaged,
    ),
    "killed-saves": Kind(
        20,
        "runs on 1 rank and on 2 ranks are killed at random times while they save checkpoints. "
        "After each kill, the newest committed checkpoint is complete",
        killed,
    ),
    "strategies": Kind(
        42,
        "every strategy produces the same losses, weights and moments as a single process",
        same_results,
    ),
    "between": Kind(
        14,
        "a checkpoint saved with one strategy resumes with every strategy, on 1 to 4 ranks",
        between,
    ),
}


def main() -> int:
    options = _options()
    counts = dict(options.kinds) or {name: kind.count for name, kind in KINDS.items()}
    summaries: list[Summary] = []
    with tempfile.TemporaryDirectory(prefix="kway-soak-", dir=options.folder) as folder:
        for name, count in counts.items():
            trials = KINDS[name].trials(Path(folder) / name, count, options.seed)
            summaries.append(run_trials(name, KINDS[name].meaning, trials))
            if options.out:
                machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
                write_page(options.out, summaries, seed=options.seed, machine=machine)
    return 0 if all(summary.passed for summary in summaries) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND=COUNT", help=" ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file for the table and the log")
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

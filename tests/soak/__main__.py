"""`python -m tests.soak [KIND …]`: training runs that are disturbed at random times.

Prints a line per trial, and at the end the table of docs/measurements.md. By default, all kinds
run, which takes about 20 minutes. The exit code is 1 if any trial fails.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak.disturbed import Trial, disturb, draw, finish, prepare

_STEPS_PER_TRIAL = 30


@dataclass(frozen=True)
class Kind:
    """A kind of trial: the number of trials, what they check, and how the runs are disturbed."""

    count: int
    meaning: str
    number: signal.Signals
    ranks: int
    deferred: bool = False

    def trials(self, folder: Path) -> Iterator[Trial]:
        num_steps = _STEPS_PER_TRIAL * self.count
        experiment = prepare(folder, num_steps=num_steps, ranks=self.ranks, deferred=self.deferred)
        for index, plan in enumerate(draw(self.number, self.count)):
            yield disturb(experiment, plan, index)
        yield finish(experiment)


_KILL = (
    "the launcher or one of three ranks is killed with SIGKILL at a random time, possibly during "
    "startup. After 1 s, no killed or orphaned process is left. The last trial completes the run "
    "and compares it with an undisturbed run: the losses are the same, the weights are "
    "bit-identical, and every sample is used once per epoch"
)
_HEADER = (
    "| trials | passed | time from the fault to the next step |",
    "| --- | --- | --- |",
)
_DEFERRED = "but the results of each step are read one step late, as on GPUs"
KINDS = {
    "kill": Kind(30, _KILL, signal.SIGKILL, 3),
    "stop": Kind(30, "the same as `kill`, but with SIGTERM and two ranks", signal.SIGTERM, 2),
    "kill-deferred": Kind(10, f"the same as `kill`, {_DEFERRED}", signal.SIGKILL, 3, True),
    "stop-deferred": Kind(10, f"the same as `stop`, {_DEFERRED}", signal.SIGTERM, 2, True),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=" ".join(KINDS))
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"choose from {', '.join(KINDS)}, not {', '.join(unknown)}")
    rows, passed = [], True
    with tempfile.TemporaryDirectory(prefix="kway-soak-") as folder:
        for name in options.kinds or KINDS:
            trials = []
            for trial in KINDS[name].trials(Path(folder) / name):
                mark = "ok  " if trial.passed else "FAIL"
                print(f"{time.strftime('%H:%M:%S')} {mark} {name}: {trial}")
                trials.append(trial)
            rows.append(_row(name, trials))
            passed &= all(trial.passed for trial in trials)
    print(*_HEADER, *rows, sep="\n")
    return 0 if passed else 1


def _row(name: str, trials: list[Trial]) -> str:
    num_passed = sum(trial.passed for trial in trials)
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    took = "-"
    if seconds:
        took = f"median {statistics.median(seconds):.1f} s, maximum {max(seconds):.1f} s"
    return f"| `{name}`: {KINDS[name].meaning} | {num_passed} of {len(trials)} | {took} |"


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())

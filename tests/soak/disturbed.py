"""Compares a run that is killed or stopped at random times with an undisturbed run. Their steps,
losses, samples and weights must be the same.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.shards.split import open_split
from tests.process_tree import descendants, is_running, left_after
from tests.shards import glyph_recipe, glyph_shards
from tests.system.processes import write_recipe
from tests.system.runs import (
    Launched,
    final_tensors,
    last_step,
    launched,
    losses,
    samples_by_step,
    send,
)

BATCH = 12
_RECOVERY_SECONDS = 120
_SECONDS_PER_STEP = 5.0
# The signal kills a launcher that has not installed its handlers yet. No training has started by
# then.
_WITHOUT_HANDLERS = (-signal.SIGTERM, -signal.SIGUSR1)


@dataclass(frozen=True)
class Trial:
    """The result of a trial. `seconds` is the time from the fault to the next step, if it was
    measured.
    """

    what: str
    passed: bool
    found: str
    seconds: float | None = None

    def __str__(self) -> str:
        took = "" if self.seconds is None else f", next step after {self.seconds:.1f} s"
        return f"{self.what}: {self.found}{took}"


@dataclass(frozen=True)
class Plan:
    """The plan of one trial: the signal, its target, and when to send it."""

    number: signal.Signals
    target: str
    at_start: bool
    wait: float

    def __str__(self) -> str:
        since = "the start" if self.at_start else "a step"
        return f"{self.number.name} to {self.target} {self.wait:.2f} s after {since}"


def draw(number: signal.Signals, trials: int) -> Iterator[Plan]:
    """Draw the plans of the trials. About half of the signals arrive during imports or resuming,
    and the others during training, evaluation or saving.
    """
    rng = random.Random(0)
    for _ in range(trials):
        at_start = rng.random() < 0.5
        wait = rng.uniform(0, 8) if at_start else rng.uniform(0, 1.5)
        yield Plan(number, rng.choice(["the launcher", "a rank"]), at_start, wait)


@dataclass(frozen=True)
class Experiment:
    """The run that all trials disturb, and an undisturbed run to compare it with."""

    folder: Path
    recipe: Path
    shards: Path
    num_steps: int
    ranks: int

    @property
    def run(self) -> Path:
        return self.folder / "disturbed"

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"


def prepare(folder: Path, *, num_steps: int, ranks: int = 2, deferred: bool = False) -> Experiment:
    """Create an experiment of `num_steps` steps on glyphs and train its undisturbed run.

    If `deferred` is true, the host reads the results of each step one step late, as on GPUs.
    """
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    recipe = glyph_recipe(
        shards,
        folder / "unused",
        head__weights__kind="vtree",
        head__loss__kind="batch_ce",
        train__duration={"steps": num_steps},
        train__synchronous=not deferred,
        checkpoint={"every": {"steps": 7}},
        evaluation={"every": {"steps": 20}},
        telemetry={"log_every": 1, "sample_ids": True},
        data__workers=1,
    )
    experiment = Experiment(folder, write_recipe(folder, recipe), shards, num_steps, ranks)
    with launched(experiment.recipe, experiment.undisturbed, num=ranks) as training:
        assert training.end(_SECONDS_PER_STEP * num_steps) == 0, training.output
    return experiment


def disturb(experiment: Experiment, plan: Plan, index: int) -> Trial:
    """Resume the run, disturb it once, and check that it stops or continues as expected.

    If a rank is killed, the launcher restarts the ranks. In all other cases, the next trial resumes
    the run.
    """
    killed = plan.number == signal.SIGKILL
    options = ("--max-restarts", "1") if killed and plan.target == "a rank" else ()
    with launched(experiment.recipe, experiment.run, *options, num=experiment.ranks) as training:
        _wait(training, plan)
        family = descendants(training.process.pid)
        step, sent_at = last_step(experiment.run), time.monotonic()
        target = _target(training, plan, index)
        send(target, plan.number)
        what = f"{plan} at step {step}"
        if killed and target != training.process.pid:
            return _recovered(training, family, step, sent_at, what)
        code = training.end()
        left = left_after(family, 1)
    done = last_step(experiment.run) == experiment.num_steps
    expected = {-signal.SIGKILL} if killed else {75, *_WITHOUT_HANDLERS}
    passed = (code in expected or (done and code == 0)) and not left
    return Trial(what, passed, f"code {code}, {len(left)} processes left")


def _wait(training: Launched, plan: Plan) -> None:
    if not plan.at_start:
        before = last_step(training.run)
        training.wait_for(
            lambda: last_step(training.run) != before or training.process.poll() is not None, "step"
        )
    deadline = time.monotonic() + plan.wait
    while time.monotonic() < deadline and training.process.poll() is None:
        time.sleep(0.01)


def _target(training: Launched, plan: Plan, index: int) -> int:
    ranks = training.ranks
    if plan.target == "the launcher" or not ranks:  # no ranks yet
        return training.process.pid
    return ranks[index % len(ranks)]


def _recovered(
    training: Launched, family: list[int], step: int, sent_at: float, what: str
) -> Trial:
    """Wait for the next new step after a rank was killed, and return the trial with the time it
    took.
    """
    deadline = sent_at + _RECOVERY_SECONDS
    while last_step(training.run) <= step and time.monotonic() < deadline:
        if training.process.poll() is not None:
            break
        time.sleep(0.01)
    seconds = time.monotonic() - sent_at
    code = training.process.poll()
    passed = last_step(training.run) > step or code == 0
    left = [
        pid for pid in family if is_running(pid) and pid not in descendants(training.process.pid)
    ]
    return Trial(what, passed and not left, f"code {code}, {len(left)} processes left", seconds)


def finish(experiment: Experiment) -> Trial:
    """Run the disturbed run to completion and compare it with the undisturbed run."""
    with launched(experiment.recipe, experiment.run, num=experiment.ranks) as training:
        code = training.end(_SECONDS_PER_STEP * experiment.num_steps)
    wrong = [] if code == 0 else [f"exit code {code}"]
    if losses(experiment.run) != losses(experiment.undisturbed):
        wrong.append("different losses")
    expected, got = final_tensors(experiment.undisturbed), final_tensors(experiment.run)
    if expected.keys() != got.keys() or any(
        not torch.equal(tensor, got[name]) for name, tensor in expected.items()
    ):
        wrong.append("different weights")
    wrong += _wrong_samples(experiment)
    return Trial("complete run", not wrong, ", ".join(wrong) or "bit-identical")


def _wrong_samples(experiment: Experiment) -> list[str]:
    """Check that each sample was used once per epoch. The last epoch may be incomplete."""
    steps = samples_by_step(experiment.run)
    if sorted(steps) != list(range(1, experiment.num_steps + 1)):
        return ["steps are missing in the sample logs"]
    stream = [sample for step in sorted(steps) for sample in steps[step]]
    num_samples = len(open_split(experiment.shards, "train"))
    epochs = len(stream) // num_samples
    counts = Counter(stream)
    once = set(counts) == set(range(num_samples)) and all(
        epochs <= count <= epochs + 1 for count in counts.values()
    )
    return (
        []
        if once and len(stream) == experiment.num_steps * BATCH
        else ["a sample is not used once per epoch"]
    )

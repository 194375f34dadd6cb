"""A run that is killed or stopped at random instants until it is done, held against an undisturbed
one: the same steps, losses, samples and weights, whatever happened in between."""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.shards.split import open_split
from tests.shards import glyph_recipe, glyph_shards
from tests.soak.trials import Trial
from tests.system.processes import write_recipe
from tests.system.runs import (
    Launched,
    descendants,
    final_tensors,
    is_running,
    last_step,
    launched,
    left_after,
    losses,
    samples_by_step,
    send,
)

BATCH = 12
_RECOVERY_SECONDS = 120
_SECONDS_A_STEP = 5.0
# Until a launcher has Python and its handlers a signal ends it as any process; it trained nothing.
_BEFORE_ITS_HANDLERS = (-signal.SIGTERM, -signal.SIGUSR1)


@dataclass(frozen=True)
class Plan:
    """One trial: who is struck, by what, and how long after what."""

    number: signal.Signals
    target: str
    at_start: bool
    wait: float

    def __str__(self) -> str:
        since = "the start" if self.at_start else "a step"
        return f"{self.number.name} to {self.target} {self.wait:.2f} s after {since}"


def draw(number: signal.Signals, trials: int, seed: int) -> Iterator[Plan]:
    """Half of the trials strike within the seconds of imports and resuming, half while it trains,
    evaluations and checkpoints included."""
    rng = random.Random(seed)
    for _ in range(trials):
        at_start = rng.random() < 0.5
        wait = rng.uniform(0, 8) if at_start else rng.uniform(0, 1.5)
        yield Plan(number, rng.choice(["the launcher", "a rank"]), at_start, wait)


@dataclass(frozen=True)
class Course:
    """The run that all trials disturb, and the one that none does."""

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


def lay(folder: Path, *, num_steps: int, ranks: int = 2) -> Course:
    """A course of so many steps on glyphs, with its undisturbed run."""
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    recipe = glyph_recipe(
        shards,
        folder / "unused",
        head__weights__kind="vtree",
        head__loss__kind="batch_ce",
        train__duration={"steps": num_steps},
        checkpoint={"every": {"steps": 7}},
        evaluation={"every": {"steps": 20}},
        telemetry={"log_every": 1, "sample_ids": True},
        data__workers=1,
    )
    course = Course(folder, write_recipe(folder, recipe), shards, num_steps, ranks)
    with launched(course.recipe, course.undisturbed, num=ranks) as training:
        assert training.end(_SECONDS_A_STEP * num_steps) == 0, training.words
    return course


def strike(course: Course, plan: Plan, index: int) -> Trial:
    """Go on with the disturbed run, disturb it once, and see that it ends, or goes on, as it must.

    A killed rank is started anew by the launcher; after all else the next trial goes on.
    """
    killed = plan.number == signal.SIGKILL
    given = ("--max-restarts", "1") if killed and plan.target == "a rank" else ()
    with launched(course.recipe, course.run, *given, num=course.ranks) as training:
        _wait(training, plan)
        family = descendants(training.process.pid)
        step, struck = last_step(course.run), time.monotonic()
        target = _target(training, plan, index)
        send(target, plan.number)
        what = f"{plan} at step {step}"
        if killed and target != training.process.pid:
            return _recovered(training, family, step, struck, what)
        code = training.end()
        left = left_after(family, 1)
    done = last_step(course.run) == course.num_steps
    ended = {-signal.SIGKILL} if killed else {75, *_BEFORE_ITS_HANDLERS}
    sound = (code in ended or (done and code == 0)) and not left
    return Trial(what, sound, f"code {code}, {len(left)} processes left", None)


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
    if plan.target == "the launcher" or not ranks:  # none yet
        return training.process.pid
    return ranks[index % len(ranks)]


def _recovered(training: Launched, family: list[int], step: int, struck: float, what: str) -> Trial:
    """From the kill of a rank to the next step that was not made before."""
    deadline = struck + _RECOVERY_SECONDS
    while last_step(training.run) <= step and time.monotonic() < deadline:
        if training.process.poll() is not None:
            break
        time.sleep(0.01)
    seconds = time.monotonic() - struck
    code = training.process.poll()
    sound = last_step(training.run) > step or code == 0
    left = [
        pid for pid in family if is_running(pid) and pid not in descendants(training.process.pid)
    ]
    return Trial(what, sound and not left, f"code {code}, {len(left)} processes left", seconds)


def finish(course: Course) -> Trial:
    """Let the disturbed run come to its end, and hold it against the undisturbed one."""
    with launched(course.recipe, course.run, num=course.ranks) as training:
        code = training.end(_SECONDS_A_STEP * course.num_steps)
    wrong = [] if code == 0 else [f"exit code {code}"]
    if losses(course.run) != losses(course.undisturbed):
        wrong.append("other losses")
    expected, got = final_tensors(course.undisturbed), final_tensors(course.run)
    if expected.keys() != got.keys() or any(
        not torch.equal(tensor, got[name]) for name, tensor in expected.items()
    ):
        wrong.append("other weights")
    wrong += _wrong_samples(course)
    return Trial("the whole run", not wrong, ", ".join(wrong) or "bit-identical", None)


def _wrong_samples(course: Course) -> list[str]:
    """Each sample once in every whole epoch; the last epoch may be cut."""
    steps = samples_by_step(course.run)
    if sorted(steps) != list(range(1, course.num_steps + 1)):
        return ["steps are missing in the sample logs"]
    stream = [sample for step in sorted(steps) for sample in steps[step]]
    num_samples = len(open_split(course.shards, "train"))
    epochs = len(stream) // num_samples
    counts = Counter(stream)
    once = set(counts) == set(range(num_samples)) and all(
        epochs <= count <= epochs + 1 for count in counts.values()
    )
    return [] if once and len(stream) == course.num_steps * BATCH else ["samples not once an epoch"]

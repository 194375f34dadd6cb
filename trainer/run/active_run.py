"""A run during training: saving, evaluating and stopping between steps."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.loading.loader import EndlessLoader
from data.shards.manifest import Manifest
from trainer.checkpoints import CheckpointWriter
from trainer.checkpoints.entries import training_entries
from trainer.config import Duration, Recipe
from trainer.evaluation import EvaluationStopped, evaluate_split, save_evaluation
from trainer.faults import Watchdog
from trainer.process.signals import Preempted, StopSignals
from trainer.run.folder import RunFolder
from trainer.run.resume import TrainState
from trainer.steps.agreement import Agreement, agree
from trainer.steps.nonfinite import NonFiniteSteps
from trainer.task import Task
from trainer.telemetry.jsonl import SampleLog
from trainer.telemetry.profile import StepProfiler
from trainer.telemetry.telemetry import Telemetry
from trainer.world import World


@dataclass
class ActiveRun:
    """The open objects of a run, and the `state` that its next checkpoint stores.

    `origin` is the provenance, which every checkpoint also stores. An epoch consists of
    `num_samples` samples. `saved_step` is the step of the newest checkpoint. `best` is the result
    of the evaluation at the current step, if there was one and `checkpoint.keep_best` is set.
    `manifest` is kept because parsing it again for an evaluation would create a second class list
    in memory.
    """

    recipe: Recipe
    folder: RunFolder
    world: World
    task: Task
    loader: EndlessLoader
    num_samples: int
    label_vectors: np.ndarray | None
    stop: StopSignals
    watchdog: Watchdog
    agreement: Agreement
    telemetry: Telemetry
    writer: CheckpointWriter
    nonfinite: NonFiniteSteps
    sample_log: SampleLog
    profiler: StepProfiler
    origin: dict[str, Any]
    state: TrainState
    saved_step: int | None
    best: float | None = None
    manifest: Manifest | None = None

    def steps(self, duration: Duration) -> int:
        """Convert a duration to steps."""
        batch = self.recipe.train.global_batch
        return duration.in_steps(num_samples=self.num_samples, global_batch=batch)

    def is_due(self, interval: Duration | None) -> bool:
        """Return whether an interval ends at the current step."""
        step = self.state.step
        return interval is not None and step > 0 and step % self.steps(interval) == 0

    def is_evaluation_due(self, num_steps: int) -> bool:
        """Return whether an evaluation is due at the current step and has not been done yet. At the
        last step, an evaluation is always due.
        """
        due = self.is_due(self.recipe.evaluation.every) or self.state.step == num_steps
        return due and self.state.evaluated < self.state.step

    def is_anything_due(self, step: int, num_steps: int) -> bool:
        """Return whether an evaluation or a checkpoint is due at `step`."""
        intervals = self.recipe.evaluation.every, self.recipe.checkpoint.every
        return step == num_steps or any(
            interval is not None and step % self.steps(interval) == 0 for interval in intervals
        )

    def advance(self, state: TrainState) -> None:
        """Record the state after a step and discard the evaluation result of the previous step."""
        self.state, self.best = state, None

    def save(self) -> None:
        """Save a checkpoint of the current state unless it already exists (collective)."""
        if self.saved_step == self.state.step or self.state.step == 0:
            return
        with self.task.phases("checkpoint"):
            try:
                state = self.state.to_json() | self.origin
                self.writer.save(training_entries(self.task), state, best=self.best)
            finally:
                self.report_saves()
        self.saved_step = self.state.step

    def stop_if_requested(self, signal_name: str | None) -> None:
        """If the ranks agreed on a stop signal, save a checkpoint, wait until it is committed and
        raise Preempted (collective).
        """
        if signal_name is not None:
            self.save()
            self.finish()
            raise Preempted(signal_name)

    def finish(self) -> None:
        """Wait for the checkpoint in progress and report the result."""
        with self.task.phases("checkpoint"):
            try:
                self.writer.finish()
            finally:
                self.report_saves()

    def report_saves(self) -> None:
        """Report the checkpoints that were committed and those that could not be written."""
        self.telemetry.committed(self.writer.committed())
        for failure in self.writer.failures():
            name = "lost_checkpoint" if failure.is_lost else "kept_checkpoints"
            self.telemetry.event(name, failure.step, failure.reason, reason=failure.reason)

    def evaluate(self) -> None:
        """Evaluate the model, or its moving averages, on the evaluation split (collective)."""
        step, best = self.state.step, self.recipe.checkpoint.keep_best
        try:
            with self.task.phases("evaluation"), self.task.averaged():
                result = evaluate_split(
                    self.task,
                    self.recipe,
                    self.world,
                    label_vectors=self.label_vectors,
                    manifest=self.manifest,
                    should_stop=lambda: self._stop_signal() is not None,
                )
        except EvaluationStopped:
            self.stop_if_requested(self._stop_signal())
            raise  # no rank received a signal
        if self.world.is_main:
            save_evaluation(self.folder.evaluations, result, step=step)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        line = f"evaluation at step {step} on {result.num_samples} samples: {numbers}"
        self.telemetry.event("evaluation", step, line, **result.metrics)
        self.state = replace(self.state, evaluated=step)
        if best is not None:
            if best.measure not in result.metrics:
                raise ValueError(
                    f"checkpoint.keep_best.measure is {best.measure}, but this run computes only "
                    f"{', '.join(result.metrics)}: choose one of these"
                )
            self.best = result.metrics[best.measure]

    def _stop_signal(self) -> str | None:
        return agree(self.world, stop=self.stop.received).stop

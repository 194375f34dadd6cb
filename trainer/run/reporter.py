"""The reports of a run: metrics, logs, evaluations and the samples of steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

from data.images.jpeg_crop import whole_images_notice
from data.loading.batch import Batch
from data.loading.stream import Stream
from trainer.checkpoints import CheckpointWriter
from trainer.config import Recipe
from trainer.evaluation import Evaluation, save_evaluation
from trainer.run.folder import RunFolder
from trainer.run.state import Resumed, TrainState
from trainer.run.training_data import RunData
from trainer.schedules import RunLength
from trainer.step import Numbers
from trainer.telemetry.jsonl import JsonLines, SampleLog, drop_lines_after
from trainer.telemetry.mfu import ModelFlops
from trainer.telemetry.phases import Phases
from trainer.telemetry.profile import StepProfiler
from trainer.telemetry.telemetry import Telemetry
from trainer.world import World

_SUGGESTION = (
    "lower optimizer.lr, increase schedule.warmup, set train.clip_norm, or inspect the samples"
)


class Reporter(AbstractContextManager["Reporter"]):
    """Reports what a run does, on every rank. No method waits for another rank.

    A resumed run replaces the records of the steps that it repeats. The caller must call `trim` on
    rank 0 before any rank opens its reporter.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        world: World,
        *,
        state: TrainState,
        length: RunLength,
        num_classes: int,
        phases: Phases,
        key_of: Callable[[int], str] | None = None,
    ) -> None:
        """`state` is the state from which the run starts. `key_of` returns the key of a sample;
        pass None if samples do not have keys."""
        self._folder, self._world = folder, world
        self.telemetry = Telemetry(
            folder.path,
            recipe.telemetry,
            world,
            start_step=state.step,
            num_steps=length.num_steps,
            global_batch=length.global_batch,
            phases=phases,
            evaluated=state.evaluated,
            skipped_steps=state.skipped,
            checkpoint_every=length.in_steps(recipe.checkpoint.every),
            flops=ModelFlops(recipe, num_classes),
        )
        self.skipped = SkippedSteps(
            folder.path,
            rank=world.rank,
            cap=recipe.train.max_skipped_steps,
            count=state.skipped,
            key_of=key_of,
        )
        trace = folder.path / f"profile-rank{world.rank}.json.gz"
        self.profiler = StepProfiler(recipe.train.profile, trace, world.device)
        self._samples = SampleLog(folder.path, rank=world.rank, enabled=recipe.telemetry.sample_ids)
        self._opened = ExitStack()

    @staticmethod
    def trim(run: Path, step: int) -> None:
        """Drop the samples logged after `step`, on all ranks, including ranks that existed only in
        earlier starts."""
        SampleLog.trim(run, step)
        for path in run.glob("nonfinite-rank*.jsonl"):
            drop_lines_after(path, step)

    def __enter__(self) -> "Reporter":
        with ExitStack() as opened:
            for part in (self.telemetry, self._samples, self.profiler):
                opened.enter_context(part)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def start(self, resumed: Resumed, introduction: str, recipe: Recipe, data: RunData) -> None:
        """Report how the run starts."""
        state, telemetry = resumed.state, self.telemetry
        for notice in resumed.notices:
            telemetry.event(notice.event, state.step, notice.line, **notice.values)
        telemetry.event("start", state.step, introduction, world_size=self._world.size)
        if isinstance(data.training, Stream):
            telemetry.print_line(data.training.notice())
        if recipe.data.text is None and (line := whole_images_notice()) is not None:
            telemetry.print_line(line)

    def step(
        self,
        step: int,
        batch: Batch,
        numbers: Numbers,
        *,
        learning_rate: float,
        busy_seconds: Sequence[float],
        bad_samples: int,
    ) -> None:
        """Report a step. `busy_seconds` contains one number per rank, and `bad_samples` is the
        total for the run so far."""
        self._samples.write(step, batch)
        self.telemetry.beat(step, busy_seconds, batch.inputs)
        if self.telemetry.is_due(step):
            self.telemetry.step(
                step,
                loss=numbers.loss,
                learning_rate=learning_rate,
                gradient_norm=numbers.gradient_norm,
                bad_samples=bad_samples,
                skipped_steps=self.skipped.count,
            )

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Store and report the evaluation after `step`."""
        if self._world.is_main:
            save_evaluation(self._folder.evaluations, result, step=step)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        line = f"evaluation at step {step} on {result.num_samples} samples: {numbers}"
        self.telemetry.event("evaluation", step, line, **result.metrics)

    def saves(self, writer: CheckpointWriter) -> None:
        """Report the checkpoints that were committed and those that could not be written."""
        self.telemetry.committed(writer.committed())
        for failure in writer.failures():
            name = "lost_checkpoint" if failure.is_lost else "kept_checkpoints"
            self.telemetry.event(name, failure.step, failure.reason, reason=failure.reason)


class SkippedSteps:
    """Counts the skipped updates of a run, of which at most `cap` are allowed.

    All ranks see the same loss and the same global norm, so they make the same decision. The
    samples of a skipped step are logged with their keys, because a bad sample is often the cause.
    `count`, the number so far, is part of the checkpoint.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        cap: int,
        count: int = 0,
        key_of: Callable[[int], str] | None = None,
    ) -> None:
        self.path = run / f"nonfinite-rank{rank}.jsonl"
        self.cap, self.count, self._key_of = cap, count, key_of

    def add(self, step: int, batch: Batch, reason: str) -> str:
        """Count a skipped step, log this rank's samples and return a message.

        Raises FloatingPointError if more than `cap` updates have been skipped.
        """
        samples = batch.indices.tolist()
        record: dict[str, object] = {"step": step, "samples": samples}
        if self._key_of is not None:
            record["keys"] = [self._key_of(sample) for sample in samples]
        with closing(JsonLines(self.path)) as lines:
            lines.write(record)
        self.count += 1
        files = self.path.with_name("nonfinite-rank*.jsonl")
        line = f"step {step}: {reason}; the update was skipped, and its samples are in {files}"
        if self.count > self.cap:
            cap = f" (train.max_skipped_steps is {self.cap})"
            raise FloatingPointError(f"{line}: {_SUGGESTION}{cap}")
        return f"{line} ({self.count} of at most {self.cap} skipped)"

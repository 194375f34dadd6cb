"""The training run, from top to bottom. Start here to read the trainer.

`train` sets up a run, and `take_steps` is the training loop. The imports show which module
implements each part; `trainer/step.py` is one step.
"""

import gc
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from data.images.jpeg_crop import whole_images_notice
from data.loading.batch import Batch, Cursor
from data.loading.loader import EndlessLoader
from data.loading.stream import Stream
from data.shards.mixture import load_manifest
from heads.collectives import collective_hook
from trainer.agreement import Agreed, Agreement, agree
from trainer.backbone.compatibility import check_modality
from trainer.checkpoints import CheckpointWriter, find_checkpoint
from trainer.checkpoints.entries import training_entries
from trainer.config import Duration, Recipe
from trainer.evaluation import evaluate_split, save_evaluation
from trainer.faults import Watchdog
from trainer.process.signals import Preempted, StopSignals
from trainer.run.data_statistics import start_from_data
from trainer.run.folder import RunFolder
from trainer.run.state import TrainState, provenance, resume
from trainer.run.training_data import RunData
from trainer.schedules import RunLength
from trainer.step import StepNumbers, read_numbers, take_step
from trainer.task import Task
from trainer.telemetry.jsonl import log_skipped_step, trim_logs
from trainer.telemetry.phases import Phases
from trainer.telemetry.telemetry import Telemetry
from trainer.world import World

# A file server keeps the lock of a machine that was lost until its lease expires: 90 s for NFSv4.
_LEASE_SECONDS = 120


def train(recipe: Recipe, world: World) -> None:
    """Run a recipe's training to completion, resuming from the run's newest checkpoint if there is
    one (collective).

    Raises ValueError or OSError for problems that the user can fix; FloatingPointError on every
    rank if the loss or the gradients are not finite in more than `train.max_skipped_steps` steps,
    which do not change the weights; and Preempted on every rank, after saving, if any rank received
    a signal to stop.
    """
    with ExitStack() as opened:
        # -------------------------------------------------------------- folder and process
        folder = RunFolder(recipe.run)
        if world.is_main:
            # The other ranks wait in a collective, which must not time out.
            seconds = min(_LEASE_SECONDS, recipe.train.timeout_seconds / 2)
            opened.enter_context(folder.locked(wait_seconds=seconds))
        stop = opened.enter_context(StopSignals())
        phases = Phases(world.device)
        timeout = recipe.train.timeout_seconds
        watchdog = opened.enter_context(Watchdog(world, timeout_seconds=timeout, phases=phases))
        opened.enter_context(collective_hook(phases.collective))

        # -------------------------------------------------------------- data
        announce = partial(print, flush=True) if world.is_main else None
        manifest = load_manifest(recipe.data, notice=announce)
        split = recipe.data.eval_split
        # Fail early if the split is missing or cannot be evaluated.
        manifest.of_split(split, key="data.eval_split")
        manifest.check_labeled(split)
        if (best := recipe.checkpoint.keep_best) is not None:
            best.measure_of(recipe.evaluation, label_sets=manifest.label_sets)
        data = RunData.open(recipe, manifest)
        global_batch = recipe.train.global_batch
        num_steps = recipe.train.duration.in_steps(
            num_samples=data.num_samples, global_batch=global_batch
        )
        length = RunLength(num_steps, data.num_samples, global_batch)

        # -------------------------------------------------------------- model
        task = data.build_task(recipe, world, phases)
        opened.callback(task.close)
        check_modality(recipe, manifest, data.tokenizer, task.backbone)
        if manifest.label_sets:
            task.head.check_label_sets()
        checkpoint, rejected = find_checkpoint(folder.checkpoints, world)
        if recipe.resume == "never" and (checkpoint is not None or rejected):
            raise ValueError(
                f"run {folder.path} contains checkpoints, but resume=never is set: choose another "
                "run folder, or set resume=auto to continue the run"
            )
        if checkpoint is None:  # otherwise, this would read the data of an epoch for nothing
            start_from_data(task, data, world)
        task.start_training()
        torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
        torch.set_float32_matmul_precision("high" if recipe.train.tf32 else "highest")
        task.train()

        # -------------------------------------------------------------- resume
        evaluated_on = f"{split} {manifest.digest(split)}"
        start = TrainState(
            step=0,
            cursor=Cursor(recipe.seed),
            tree=task.head.tree_digest(),
            data=data.training.digest(),
            tokenizer=data.tokenizer_digest(),
            origin=provenance(recipe, evaluated_on=evaluated_on),
        )
        state, notices = resume(
            folder, task, start, world, found=(checkpoint, rejected), length=length
        )
        if world.is_main:
            trim_logs(folder.path, state.step)
            folder.write(recipe)
        world.barrier()

        # -------------------------------------------------------------- logs, checkpoints, loader
        telemetry = opened.enter_context(
            Telemetry(
                folder.path,
                recipe.telemetry,
                world,
                start_step=state.step,
                num_steps=num_steps,
                global_batch=global_batch,
                checkpoint_every=length.in_steps(recipe.checkpoint.every),
                phases=phases,
                evaluated=state.evaluated,
                skipped_steps=state.skipped,
            )
        )
        keep_every = recipe.checkpoint.keep_every
        writer = opened.enter_context(
            CheckpointWriter(
                folder.checkpoints,
                recipe.checkpoint,
                world,
                start_step=state.step,
                keep_every_steps=None if keep_every is None else length.in_steps(keep_every),
                evaluated_on=evaluated_on,
                timeout_seconds=timeout,
            )
        )
        loader = opened.enter_context(data.open_loader(recipe, world, state.cursor))
        run = Run(
            task=task,
            data=data,
            length=length,
            loader=loader,
            stop=stop,
            watchdog=watchdog,
            agreement=opened.enter_context(Agreement(world)),
            telemetry=telemetry,
            writer=writer,
            state=state,
            saved_step=state.step,
        )
        for notice in notices:
            telemetry.report(notice)
        introduction = _introduction(task, data, state.step, num_steps)
        telemetry.event("start", state.step, introduction, world_size=world.size)
        if isinstance(data.training, Stream):
            telemetry.print_line(data.training.notice())
        if recipe.data.text is None and (line := whole_images_notice()) is not None:
            telemetry.print_line(line)

        # -------------------------------------------------------------- steps
        # Exclude the objects that exist until the end of the run from garbage collection. A
        # collection on one rank delays all ranks, and it is much shorter without them.
        gc.collect()
        gc.freeze()
        opened.callback(gc.unfreeze)
        take_steps(run, num_steps)


def _introduction(task: Task, data: RunData, start_step: int, num_steps: int) -> str:
    recipe, world, training = task.recipe, task.world, data.training
    start = f", from step {start_step}" if start_step else ""
    spread = f" {recipe.train.strategy.kind}" if world.size > 1 else ""
    initial = ""
    if task.num_initial_rows is not None and not start_step:
        initial = f"; rows of {task.num_initial_rows} classes from {recipe.head.init}"
    return (
        f"{recipe.run}: {len(training)} samples, {training.num_classes} classes; backbone "
        f"{task.num_backbone_weights} weights, head {recipe.head.weights.kind} x "
        f"{recipe.head.loss.kind} {task.head.tree.num_nodes} x {task.head.dim} "
        f"{recipe.head.dtype}; {world.size} x {world.device.type}{spread}; {num_steps} steps of "
        f"{recipe.train.global_batch}{start}{initial}"
    )


def take_steps(run: "Run", num_steps: int) -> None:
    """Train until step `num_steps`, evaluate and save checkpoints when due, and evaluate the final
    model (collective).

    If the task defers, the numbers of step t are read after step t + 1 is launched, so that the
    device always has work (`trainer/step.py`). A stop signal ends the run after the first step that
    begins after the signal.
    """
    task, recipe, agreement = run.task, run.task.recipe, run.agreement
    if run.is_evaluation_due(num_steps):
        run.evaluate()  # the previous process was stopped during this evaluation
        run.saved_step = None  # save again: a checkpoint records its evaluation result
        run.save()
    if run.state.step < num_steps:
        # A signal that was received during startup stops the run before its first step.
        run.stop_if_requested(agree(task.world, stop=run.stop.received).stop)
    task.phases.take_busy()  # Exclude startup time from the first step.
    length = replace(run.length, num_steps=num_steps)
    launched: _TakenStep | None = None
    try:
        for step in range(run.state.step + 1, num_steps + 1):
            run.watchdog.at(step)
            with task.phases("data"):
                batch = next(run.loader)
            record = batch.without_data()
            exchange = agreement.start(
                stop=run.stop.received, batch=record, busy_seconds=task.phases.take_busy()
            )
            factor = recipe.schedule.rate_factor(step - 1, length)
            numbers = take_step(task, batch, factor, step=step, check=agreement.check)
            if launched is not None:
                previous, launched = launched, None
                run.complete(previous)
            agreed = exchange()
            run.loader.add_bad(agreed.bad)
            taken = _TakenStep(step, record, factor, agreed, run.loader.cursor, numbers)
            intervals = recipe.evaluation.every, recipe.checkpoint.every
            is_due = step == num_steps or any(run.ends_at(step, each) for each in intervals)
            if task.defers and agreed.stop is None and not is_due:
                launched = taken
                continue
            run.complete(taken)
            run.stop_if_requested(agreed.stop)
            # Evaluate before saving, so that the checkpoint records the result and a run that
            # resumes from it does not evaluate again.
            if run.is_evaluation_due(num_steps):
                run.evaluate()
            if (
                step == num_steps
                or run.best is not None
                or run.ends_at(step, recipe.checkpoint.every)
            ):
                run.save()
    except BaseException:
        if launched is not None:
            with suppress(Exception):  # the device may have failed, too
                run.complete(launched, explains=False)
        raise
    run.finish()


@dataclass(frozen=True)
class _TakenStep:
    """A step that was taken or, if its numbers are deferred, launched. `cursor` is the position in
    the data after its batch."""

    step: int
    batch: Batch
    factor: float
    agreed: Agreed
    cursor: Cursor
    numbers: StepNumbers


@dataclass
class Run:
    """The open objects of a run, and the `state` that its next checkpoint stores.

    `saved_step` is the step of the newest checkpoint. `best` is the result of the evaluation at the
    current step, if there was one and `checkpoint.keep_best` is set.
    """

    task: Task
    data: RunData
    length: RunLength
    loader: EndlessLoader
    stop: StopSignals
    watchdog: Watchdog
    agreement: Agreement
    telemetry: Telemetry
    writer: CheckpointWriter
    state: TrainState
    saved_step: int | None
    best: float | None = None

    def ends_at(self, step: int, interval: Duration | None) -> bool:
        """Return whether an interval ends at `step`."""
        return interval is not None and step > 0 and step % self.length.in_steps(interval) == 0

    def is_evaluation_due(self, num_steps: int) -> bool:
        """Return whether an evaluation is due at the current step and has not been done yet. At the
        last step, an evaluation is always due.
        """
        step = self.state.step
        due = step == num_steps or self.ends_at(step, self.task.recipe.evaluation.every)
        return due and self.state.evaluated < step

    def complete(self, taken: _TakenStep, *, explains: bool = True) -> None:
        """Record a step in the state for the next checkpoint, the logs and the metrics (collective
        if `explains` is true; see `read_numbers`).

        A skipped step that is not an fp16 overflow counts towards `train.max_skipped_steps`.
        """
        task, telemetry, step = self.task, self.telemetry, taken.step
        check = self.agreement.check
        numbers = read_numbers(task, taken.numbers, explains=explains, check=check)
        num_skipped = self.state.skipped
        if numbers.skipped and not numbers.overflowed:
            num_skipped += 1
            training = self.data.training
            line = log_skipped_step(
                task.recipe.run / f"nonfinite-rank{task.world.rank}.jsonl",
                step,
                taken.batch,
                numbers.reason,
                count=num_skipped,
                cap=task.recipe.train.max_skipped_steps,
                key_of=None if isinstance(training, Stream) else training.key,
            )
            telemetry.print_line(line)
        rate = task.recipe.optimizer.lr * taken.factor
        self.best = None  # of the previous step
        self.state = replace(
            self.state,
            step=step,
            cursor=taken.cursor,
            skipped=num_skipped,
            learning_rate=rate,
        )
        self._report_saves()
        telemetry.samples(step, taken.batch)
        telemetry.beat(step, taken.agreed.busy_seconds)
        if telemetry.is_due(step):
            telemetry.step(
                step,
                loss=numbers.loss,
                learning_rate=rate,
                gradient_norm=numbers.gradient_norm,
                bad_samples=len(taken.cursor.bad),
                skipped_steps=num_skipped,
            )

    def evaluate(self) -> None:
        """Evaluate the model, or its moving averages, on the evaluation split (collective)."""
        task, best = self.task, self.task.recipe.checkpoint.keep_best

        def check() -> None:
            if (signal_name := agree(task.world, stop=self.stop.received).stop) is not None:
                raise Preempted(signal_name)

        try:
            with task.phases("evaluation"), task.averaged():
                result = evaluate_split(
                    task,
                    task.recipe,
                    task.world,
                    label_vectors=self.data.label_vectors,
                    inverse_propensities=self.data.inverse_propensities(task.recipe.evaluation),
                    # Parsing it again would create a second class list in memory.
                    manifest=self.data.manifest,
                    check=check,
                )
        except Preempted as stopped:
            self.stop_if_requested(stopped.signal_name)
            raise
        step, found = self.state.step, result.metrics
        if task.world.is_main:
            save_evaluation(RunFolder(task.recipe.run).evaluations, result, step=step)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        line = f"evaluation at step {step} on {result.num_samples} samples: {numbers}"
        self.telemetry.event("evaluation", step, line, **found)
        self.state = replace(self.state, evaluated=step)
        if best is not None:
            of_sets = self.data.manifest.label_sets
            measure = best.measure_of(task.recipe.evaluation, label_sets=of_sets)
            if measure not in found:
                raise ValueError(
                    f"checkpoint.keep_best.measure is {measure}, but this run computes only "
                    f"{', '.join(found)}: choose one of these"
                )
            self.best = found[measure]

    def save(self) -> None:
        """Save a checkpoint of the current state unless it already exists (collective)."""
        if self.saved_step == self.state.step or self.state.step == 0:
            return
        with self.task.phases("checkpoint"):
            try:
                entries = training_entries(self.task)
                state = replace(self.state, loss_scale=self.task.loss_scale.to_json())
                self.writer.save(entries, state.to_json(), best=self.best)
            finally:
                self._report_saves()
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
                self._report_saves()

    def _report_saves(self) -> None:
        """Report the checkpoints that were committed and those that could not be written."""
        for event in self.writer.events():
            self.telemetry.report(event)

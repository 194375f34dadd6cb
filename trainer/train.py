"""The training run, from top to bottom. Start here to read the trainer.

`train` sets up a run, and `take_steps` is the training loop. The imports show which module
implements each part.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from data.images.jpeg_crop import whole_images_notice
from data.loading.batch import Batch, Cursor
from data.loading.stream import Stream
from heads.collectives import collective_hook
from trainer.backbone.compatibility import check_modality, tokenizer_digest
from trainer.checkpoints import CheckpointWriter
from trainer.config import Duration, Recipe
from trainer.faults import Watchdog
from trainer.process.signals import StopSignals
from trainer.run.active_run import ActiveRun
from trainer.run.folder import RunFolder
from trainer.run.provenance import provenance
from trainer.run.resume import Resumed, TrainState, resume
from trainer.run.training_data import (
    Training,
    class_counts_of,
    class_paths_of,
    epoch_length,
    label_vectors_of,
    load_run_manifest,
    open_loader,
    open_training,
)
from trainer.schedules import RunLength
from trainer.steps.agreement import Agreed, Agreement, agree
from trainer.steps.deferred import DeferredNumbers, Numbers
from trainer.steps.nonfinite import NonFiniteSteps
from trainer.steps.take import read_numbers, take_step
from trainer.task import Task, build_task
from trainer.telemetry.jsonl import SampleLog
from trainer.telemetry.mfu import ModelFlops
from trainer.telemetry.phases import Phases
from trainer.telemetry.profile import StepProfiler
from trainer.telemetry.telemetry import Telemetry, check_telemetry
from trainer.world import World

# A file server keeps the lock of a machine that was lost until its lease expires: 90 s for NFSv4.
_LEASE_SECONDS = 120


def train(recipe: Recipe, world: World, *, dry_run: bool = False) -> None:
    """Run a recipe's training to completion, resuming from the run's newest checkpoint if there is
    one (collective).

    A dry run stops before the first step and writes nothing; a signal stops it immediately.

    Raises ValueError or OSError for problems that the user can fix; FloatingPointError on every
    rank if the loss or the gradients are not finite in more than `train.max_skipped_steps` steps,
    which do not change the weights; and Preempted on every rank, after saving, if any rank received
    a signal to stop.
    """
    folder = RunFolder(recipe.run)
    with ExitStack() as opened:
        if dry_run:
            folder.check_writable()
        elif world.is_main:
            # The other ranks wait in a collective, which must not time out.
            seconds = min(_LEASE_SECONDS, recipe.train.timeout_seconds / 2)
            opened.enter_context(folder.locked(wait_seconds=seconds))
        _train(recipe, folder, world, opened, dry_run=dry_run)


def _train(
    recipe: Recipe, folder: RunFolder, world: World, opened: ExitStack, *, dry_run: bool
) -> None:
    stop = StopSignals()
    if not dry_run:
        opened.enter_context(stop)
    phases = Phases(world.device)
    watchdog = opened.enter_context(
        Watchdog(world, timeout_seconds=recipe.train.timeout_seconds, phases=phases)
    )
    opened.enter_context(collective_hook(phases.collective))

    # ---------------------------------------------------------------- data
    manifest = load_run_manifest(recipe.data, is_main=world.is_main)
    data = recipe.data
    training = open_training(data, manifest)
    manifest.of_split(data.eval_split, key="data.eval_split")  # fail early if the split is missing
    label_vectors = label_vectors_of(recipe, manifest)
    global_batch = recipe.train.global_batch
    num_samples = epoch_length(training, data)
    steps = partial(Duration.in_steps, num_samples=num_samples, global_batch=global_batch)
    num_steps = steps(recipe.train.duration)
    length = RunLength(num_steps, num_samples, global_batch)

    # ---------------------------------------------------------------- model
    task = build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=label_vectors,
        world=world,
        class_counts=class_counts_of(training, data),
        class_paths=class_paths_of(recipe, manifest),
        phases=phases,
    )
    opened.callback(task.close)
    check_modality(recipe, manifest, task.backbone)
    task.start_training()
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    torch.set_float32_matmul_precision("high" if recipe.train.tf32 else "highest")
    task.train()

    # ---------------------------------------------------------------- resume
    if world.is_main:
        folder.check(recipe)
    world.barrier()
    evaluated_on = f"{data.eval_split} {manifest.digest(data.eval_split)}"
    best = recipe.checkpoint.keep_best
    if best is not None and best.measure.startswith("marginal"):
        evaluated_on += f" at temperature {recipe.evaluation.marginal_temperature:g}"
    origin = provenance(recipe, evaluated_on=evaluated_on)
    start = _start_state(recipe, task, training)
    resumed = resume(folder, task, start, world, origin=origin, length=length)
    state = resumed.state
    introduction = _introduction(recipe, task, training, world, state.step, num_steps)
    if dry_run:
        _finish_dry_run(recipe, training, world, resumed, introduction)
        return
    if world.is_main:
        SampleLog.trim(folder.path, state.step)
        NonFiniteSteps.trim(folder.path, state.step)
        folder.write(recipe)
    world.barrier()

    # ---------------------------------------------------------------- logs, checkpoints, loader
    telemetry = opened.enter_context(
        Telemetry(
            folder.path,
            recipe.telemetry,
            world,
            start_step=state.step,
            num_steps=num_steps,
            global_batch=global_batch,
            phases=phases,
            evaluated=state.evaluated,
            skipped_steps=state.skipped,
            checkpoint_every=steps(recipe.checkpoint.every),
            flops=ModelFlops(recipe, len(manifest.classes)),
        )
    )
    keep_every = recipe.checkpoint.keep_every
    writer = opened.enter_context(
        CheckpointWriter(
            folder.checkpoints,
            recipe.checkpoint,
            world,
            start_step=state.step,
            keep_every_steps=None if keep_every is None else steps(keep_every),
            evaluated_on=evaluated_on,
            timeout_seconds=recipe.train.timeout_seconds,
            print_line=telemetry.print_line,
        )
    )
    loader = opened.enter_context(open_loader(training, recipe, world, state.cursor))
    sample_log = opened.enter_context(
        SampleLog(folder.path, rank=world.rank, enabled=recipe.telemetry.sample_ids)
    )
    agreement = opened.enter_context(Agreement(world))
    trace = folder.path / f"profile-rank{world.rank}.json.gz"
    profiler = opened.enter_context(StepProfiler(recipe.train.profile, trace, world.device))
    run = ActiveRun(
        recipe=recipe,
        folder=folder,
        world=world,
        task=task,
        loader=loader,
        num_samples=num_samples,
        label_vectors=label_vectors,
        stop=stop,
        watchdog=watchdog,
        agreement=agreement,
        telemetry=telemetry,
        writer=writer,
        nonfinite=NonFiniteSteps(
            folder.path,
            rank=world.rank,
            cap=recipe.train.max_skipped_steps,
            skipped=state.skipped,
            key_of=None if isinstance(training, Stream) else training.key,
        ),
        sample_log=sample_log,
        profiler=profiler,
        origin=origin,
        state=state,
        saved_step=state.step,
        manifest=manifest,
    )
    _report_start(telemetry, resumed, introduction, recipe, training, world)
    opened.enter_context(_objects_frozen())
    take_steps(run, num_steps)


def _start_state(recipe: Recipe, task: Task, training: Training) -> TrainState:
    return TrainState(
        step=0,
        cursor=Cursor(recipe.seed),
        tree=task.head.tree_digest(),
        data=training.digest(),
        tokenizer=tokenizer_digest(recipe),
    )


@contextmanager
def _objects_frozen() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection inside the context.

    These objects exist until the end of the run. A collection on one rank delays all ranks, and it
    is much shorter without them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _finish_dry_run(
    recipe: Recipe, training: Training, world: World, resumed: Resumed, introduction: str
) -> None:
    """Check the telemetry, read this rank's share of the run's first global batch, and print the
    result (collective)."""
    check_telemetry(recipe.telemetry, world)
    with open_loader(training, recipe, world, resumed.state.cursor) as loader:
        next(loader)
    world.barrier()
    if world.is_main:
        lines = [notice.line for notice in resumed.notices]
        print(*lines, f"dry run passed: {introduction}", sep="\n", flush=True)


def _report_start(
    telemetry: Telemetry,
    resumed: Resumed,
    introduction: str,
    recipe: Recipe,
    training: Training,
    world: World,
) -> None:
    state = resumed.state
    for notice in resumed.notices:
        telemetry.event(notice.event, state.step, notice.line, **notice.values)
    telemetry.event("start", state.step, introduction, world_size=world.size)
    if isinstance(training, Stream):
        telemetry.print_line(training.notice())
    if recipe.data.text is None and (line := whole_images_notice()) is not None:
        telemetry.print_line(line)


def take_steps(run: ActiveRun, num_steps: int) -> None:
    """Train until step `num_steps`, evaluate and save checkpoints when due, and evaluate the final
    model (collective).

    If the task defers, the numbers of step t are read after step t + 1 is launched, so that the
    device always has work (`trainer/steps/deferred.py`). A stop signal ends the run after the first
    step that begins after the signal.
    """
    recipe, world, task = run.recipe, run.world, run.task
    if run.is_evaluation_due(num_steps):
        run.evaluate()  # the previous process was stopped during this evaluation
        run.saved_step = None  # save again: a checkpoint records its evaluation result
        run.save()
    if run.state.step < num_steps:
        # A signal that was received during startup stops the run before its first step.
        run.stop_if_requested(agree(world, stop=run.stop.received).stop)
    task.phases.take_busy()  # Exclude startup time from the first step.
    length = RunLength(num_steps, run.num_samples, recipe.train.global_batch)
    launched: _TakenStep | None = None
    try:
        for step in range(run.state.step + 1, num_steps + 1):
            run.watchdog.at(step)
            with task.phases("data"):
                batch = next(run.loader)
            record = batch.without_data()
            exchange = run.agreement.start(
                stop=run.stop.received, batch=record, busy_seconds=task.phases.take_busy()
            )
            factor = recipe.schedule.rate_factor(step - 1, length)
            numbers = take_step(task, batch, factor, step=step, check=run.agreement.check)
            run.profiler.step()
            if launched is not None:
                previous, launched = launched, None
                _complete(run, previous)
            agreed = exchange()
            run.loader.add_bad(agreed.bad)
            taken = _TakenStep(step, record, factor, agreed, run.loader.cursor, numbers)
            is_due = agreed.stop is not None or run.is_anything_due(step, num_steps)
            if task.defers and not is_due:
                launched = taken
                continue
            _complete(run, taken)
            run.stop_if_requested(agreed.stop)
            # Evaluate before saving, so that the checkpoint records the result and a run that
            # resumes from it does not evaluate again.
            if run.is_evaluation_due(num_steps):
                run.evaluate()
            if step == num_steps or run.best is not None or run.is_due(recipe.checkpoint.every):
                run.save()
    except BaseException:
        if launched is not None:
            with suppress(Exception):  # the device may have failed, too
                _complete(run, launched, explains=False)
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
    numbers: Numbers | DeferredNumbers


def _complete(run: ActiveRun, taken: _TakenStep, *, explains: bool = True) -> None:
    """Record a step in the state for the next checkpoint, the logs and the metrics (collective if
    `explains` is true; see `read_numbers`).

    A skipped step is an fp16 overflow, which lowers the loss scale, or it counts towards
    `train.max_skipped_steps`.
    """
    task, telemetry, step = run.task, run.telemetry, taken.step
    check = run.agreement.check
    numbers = read_numbers(task, taken.numbers, explains=explains, check=check)
    if not numbers.skipped:
        task.loss_scale.succeeded()
    elif not (math.isfinite(numbers.loss) and task.loss_scale.overflowed()):
        telemetry.print_line(run.nonfinite.skip(step, taken.batch, numbers.reason))
    run.advance(
        replace(
            run.state,
            step=step,
            cursor=taken.cursor,
            skipped=run.nonfinite.skipped,
            loss_scale=task.loss_scale.to_json(),
            learning_rate=run.recipe.optimizer.lr * taken.factor,
        )
    )
    run.sample_log.write(step, taken.batch)
    telemetry.beat(step, taken.agreed.busy_seconds, taken.batch.inputs)
    run.report_saves()
    if telemetry.is_due(step):
        telemetry.step(
            step,
            loss=numbers.loss,
            learning_rate=run.recipe.optimizer.lr * taken.factor,
            gradient_norm=numbers.gradient_norm,
            bad_samples=len(run.state.cursor.bad),
            skipped_steps=run.nonfinite.skipped,
        )


def _introduction(
    recipe: Recipe,
    task: Task,
    training: Training,
    world: World,
    start_step: int,
    num_steps: int,
) -> str:
    weights, strategy = task.num_backbone_weights, recipe.train.strategy.kind
    nodes = task.head.tree.num_nodes
    start = f", from step {start_step}" if start_step else ""
    spread = f" {strategy}" if world.size > 1 else ""
    initial = ""
    if task.num_initial_rows is not None and not start_step:
        initial = f"; rows of {task.num_initial_rows} classes from {recipe.head.init}"
    return (
        f"{recipe.run}: {len(training)} samples, {training.num_classes} classes; backbone "
        f"{weights} weights, head {recipe.head.weights.kind} x {recipe.head.loss.kind} "
        f"{nodes} x {task.head.dim} {recipe.head.dtype}; {world.size} x {world.device.type}"
        f"{spread}; {num_steps} steps of {recipe.train.global_batch}{start}{initial}"
    )

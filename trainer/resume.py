"""Takes a task up where its newest sound checkpoint left it."""

from trainer.checkpoints import (
    Checkpoint,
    find_checkpoint,
    load_tensors,
    restore_random_state,
    stored_names,
)
from trainer.entries import create_moments, restore_training, training_entries
from trainer.nonfinite import NonFiniteSteps
from trainer.run import RunFolder
from trainer.state import TrainState
from trainer.step_log import SampleLog
from trainer.task import Task
from trainer.world import World


def resume(
    folder: RunFolder, task: Task, state: TrainState, world: World, *, num_steps: int
) -> tuple[TrainState, list[str]]:
    """The state that the run goes on from, `state` where it begins, and which checkpoints were
    refused; the task and the random state follow (collective).

    Raises ValueError where the checkpoint does not belong to this run, or lies beyond its end.
    """
    checkpoint, refused = find_checkpoint(folder.checkpoints, world)
    if checkpoint is not None:
        state = state.resumed(checkpoint)
        stored = stored_names(checkpoint)
        _check_average(checkpoint, task, stored)
        # Before the first update there are none, nor under SGD without momentum.
        if any(name.startswith("optimizer.") for name in stored):
            create_moments(task)
        entries = training_entries(task)
        load_tensors(checkpoint, entries, world)
        restore_training(task, entries)
        if state.loss_scale is not None:
            task.loss_scale.restore(state.loss_scale)
        restore_random_state(checkpoint, world, seed=task.recipe.seed)
    if state.step > num_steps:
        raise ValueError(
            f"run {folder.path} is at step {state.step} and train.duration is {num_steps} steps: "
            "lengthen it, or choose another run folder"
        )
    if world.is_main:
        SampleLog.trim(folder.path, state.step)
        NonFiniteSteps.trim(folder.path, state.step)
    world.barrier()
    return state, refused


def _check_average(checkpoint: Checkpoint, task: Task, stored: set[str]) -> None:
    if task.average is not None and not any(name.startswith("ema.") for name in stored):
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained without train.ema: leave it out, or start "
            "another run folder"
        )

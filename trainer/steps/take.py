"""Takes one training step: gradients, clipping and update.

If the loss or the gradient norm is not finite, the step changes nothing. Either the host checks
this, or the device sets a flag (`trainer/steps/deferred.py`). The host reads the flag before the
update; or the optimizers read it and skip the update, and the host reads it later.
"""

import math
from collections.abc import Callable

import torch

from data.loading.batch import Batch
from heads.engine.inputs import NOTHING_COUNTS
from trainer.backbone.batch_norm import BufferCopies
from trainer.steps.deferred import DeferredNumbers, Numbers, flagged
from trainer.steps.gradients import compute_gradients, error_of_part
from trainer.task import Task


def _no_check() -> None:
    """Do nothing, if there are no other ranks or if all of them are alive."""


def take_step(
    task: Task,
    batch: Batch,
    rate_factor: float,
    *,
    step: int,
    check: Callable[[], None] = _no_check,
) -> Numbers | DeferredNumbers:
    """Take a step at `rate_factor` times the peak learning rates (collective).

    If the task defers, the step is only launched, and `read_numbers` returns its numbers later.
    Otherwise, see `DeferredNumbers.read` for `check`.
    """
    copies = BufferCopies(task.backbone)
    task.set_rates(rate_factor)
    if not task.is_flagged:
        return _take(task, batch, copies, step=step)
    if task.defers:
        return _launch(task, batch, copies, step=step)
    return _take_flagged(task, batch, copies, step=step, check=check)


def read_numbers(
    task: Task,
    taken: Numbers | DeferredNumbers,
    *,
    explains: bool = True,
    check: Callable[[], None] = _no_check,
) -> Numbers:
    """Return the numbers of a step. Waits for the device if the step was deferred; see
    `DeferredNumbers.read` for `check`.

    If `explains` is true, the reason for a NaN loss names the ranks and rows (collective). Raises
    ValueError on every rank if no row of the global batch has a positive weight.
    """
    if isinstance(taken, Numbers):
        return taken
    loss, norm, skipped = taken.read(check)
    if not skipped:
        return Numbers(loss, norm)
    if not taken.total_weight():
        raise ValueError(f"step {taken.step}: {NOTHING_COUNTS}")
    reason, broken = _reason(loss, norm), taken.broken_part()
    if broken is not None and explains:
        part, num_rows, rows = broken
        error = task.head.nan_error(num_rows, rows.to(task.world.device))
        reason = _without_suggestion(error_of_part(task, error, part))
    return _skipped(task, loss, norm, reason)


def _skipped(task: Task, loss: float, norm: float, reason: str) -> Numbers:
    """Return the numbers of a step that changed nothing.

    Raises FloatingPointError if the backward pass had already updated class rows: they are updated
    if the loss is finite, before the gradients of the backbone are known.
    """
    if task.recipe.optimizer.head.fused_sgd == "in_backward" and math.isfinite(loss):
        raise FloatingPointError(
            f"{reason}, but the class rows were already updated, so the step cannot be skipped: "
            "lower optimizer.lr or optimizer.head.lr, or set optimizer.head.fused_sgd=deferred"
        )
    return Numbers(loss, norm, True, reason)


def _take(task: Task, batch: Batch, copies: BufferCopies, *, step: int) -> Numbers:
    loss = norm = math.nan
    try:
        loss = float(compute_gradients(task, batch, step=step).loss)
        norm = task.clip_gradients(task.recipe.train.clip_norm)
        reason = _reason(loss, norm)
    except FloatingPointError as error:
        reason = _without_suggestion(error)
    if math.isfinite(loss) and math.isfinite(norm):
        task.step(step=step)
        return Numbers(loss, norm)
    task.zero_gradients()
    copies.restore()
    return _skipped(task, loss, norm, reason)


def _take_flagged(
    task: Task,
    batch: Batch,
    copies: BufferCopies,
    *,
    step: int,
    check: Callable[[], None],
) -> Numbers:
    numbers = read_numbers(task, _compute(task, batch, step=step), check=check)
    if numbers.skipped:
        task.zero_gradients()
        copies.restore()
        return numbers
    with task.phases("optimizer"):
        task.divide_gradients(numbers.gradient_norm, task.recipe.train.clip_norm)
    task.step(step=step)
    return numbers


def _launch(task: Task, batch: Batch, copies: BufferCopies, *, step: int) -> DeferredNumbers:
    scale = task.current_loss_scale()
    numbers = _compute(task, batch, step=step)
    loss, norm, skipped = numbers.loss, numbers.norm, numbers.skipped
    with task.phases("optimizer"):
        excess = torch.ones_like(norm)
        if (max_norm := task.recipe.train.clip_norm) is not None:
            excess = excess.where(norm <= max_norm, (norm + 1e-6) / max_norm)
        # Class rows that are already updated cannot be divided. Then there is no loss scale.
        updates_early = task.recipe.optimizer.head.fused_sgd == "in_backward"
        divisor = None if updates_early else (scale * excess).float()
    assert task.head_optimizer is not None
    copies.restore_where(skipped)  # before the moving average reads the buffers
    with flagged([task.strategy.optimizer, task.head_optimizer], divisor, skipped):
        task.step(step=step, skipped=skipped)
    task.loss_scale.update_on_device(loss, skipped)
    return numbers


def _compute(task: Task, batch: Batch, *, step: int) -> DeferredNumbers:
    """Compute the gradients of a step, and start to copy its numbers to the host."""
    scale = task.current_loss_scale()
    found = compute_gradients(task, batch, step=step)
    with task.phases("optimizer"):
        norm = task.scaled_gradient_norm() / scale
    return DeferredNumbers(step, found.loss, norm, found.part_losses, found.part_weights)


def _reason(loss: float, norm: float) -> str:
    return f"the loss is {loss} and the gradient norm is {norm}"


def _without_suggestion(error: FloatingPointError) -> str:
    """Remove the head's suggestion, which does not name recipe keys."""
    return str(error).rpartition(": ")[0]

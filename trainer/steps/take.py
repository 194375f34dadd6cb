"""Takes one training step: gradients, clipping and update.

If the loss or the gradient norm is not finite, the step changes nothing. Either the host checks
this, or the device does while the host continues (`trainer/steps/deferred.py`).
"""

import math

import torch

from data.loading.batch import Batch
from trainer.backbone.batch_norm import BufferCopies
from trainer.steps.deferred import DeferredNumbers, Numbers, flagged
from trainer.task import Task


def take_step(
    task: Task, batch: Batch, rate_factor: float, *, step: int
) -> Numbers | DeferredNumbers:
    """Take a step at `rate_factor` times the peak learning rates (collective).

    If the task defers, the step is only launched, and `read_numbers` returns its numbers later.
    """
    copies = BufferCopies(task.backbone)
    if task.defers:
        return _launch(task, batch, rate_factor, copies, step=step)
    return _take(task, batch, rate_factor, copies, step=step)


def read_numbers(task: Task, taken: Numbers | DeferredNumbers, *, explains: bool = True) -> Numbers:
    """Return the numbers of a step. Waits for the device if the step was deferred.

    If `explains` is true, the reason for a NaN loss names the ranks and rows (collective).
    """
    if isinstance(taken, Numbers):
        return taken
    loss, norm, skipped = taken.read()
    if not skipped:
        return Numbers(loss, norm)
    reason, broken = _reason(loss, norm), taken.broken_part()
    if broken is not None and explains:
        part, num_rows, rows = broken
        error = task.head.nan_error(num_rows, rows.to(task.world.device))
        reason = _without_suggestion(task.error_of_part(error, part))
    return Numbers(loss, norm, True, reason)


def _take(
    task: Task, batch: Batch, rate_factor: float, copies: BufferCopies, *, step: int
) -> Numbers:
    loss = norm = math.nan
    try:
        loss = float(task.backward(batch, step=step))
        norm = task.clip_gradients(task.recipe.train.clip_norm)
        reason = _reason(loss, norm)
    except FloatingPointError as error:
        reason = _without_suggestion(error)
    if math.isfinite(loss) and math.isfinite(norm):
        task.step(rate_factor, step=step)
        return Numbers(loss, norm)
    task.zero_gradients()
    copies.restore()
    return Numbers(loss, norm, True, reason)


def _launch(
    task: Task, batch: Batch, rate_factor: float, copies: BufferCopies, *, step: int
) -> DeferredNumbers:
    scale = task.current_loss_scale()
    loss = task.backward(batch, step=step)
    with task.phases("optimizer"):
        norm = task.scaled_gradient_norm() / scale
        skipped = ~(loss.isfinite() & norm.isfinite())
        excess = torch.ones_like(norm)
        if (max_norm := task.recipe.train.clip_norm) is not None:
            excess = excess.where(norm <= max_norm, (norm + 1e-6) / max_norm)
        divisor = (scale * excess).float()
    assert task.head_optimizer is not None
    copies.restore_where(skipped)  # before the moving average reads the buffers
    with flagged([task.strategy.optimizer, task.head_optimizer], divisor, skipped):
        task.step(rate_factor, step=step, skipped=skipped)
    task.loss_scale.update_on_device(loss, skipped)
    return DeferredNumbers(loss, norm, skipped, task.part_losses)


def _reason(loss: float, norm: float) -> str:
    return f"the loss is {loss} and the gradient norm is {norm}"


def _without_suggestion(error: FloatingPointError) -> str:
    """Remove the head's suggestion, which does not name recipe keys."""
    return str(error).rpartition(": ")[0]

"""What a loss costs a logit: bytes held and moved, measured by running it on one small block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.losses import Block, ClassFacts, Loss
from heads.step import BlockWork
from heads.tree import LabelTree
from launch.plan.ledger import Ledger

# Enough that what does not grow with the block is nothing, and a few milliseconds of work.
_ROWS, _CLASSES = 256, 2048
_VECTOR_DIM = 300


@dataclass(frozen=True)
class LossCost:
    """Of a loss: numbers a row that ranks exchange, and bytes a logit in float32 beside the logit.

    `kept` is what a graph keeps until backward, `peak` the most that is live in a block's forward
    and backward, `forward` and `backward` what they read and write. `constants` are bytes a class
    that the loss itself holds.
    """

    width: int
    couples_rows: bool
    kept: float
    peak: float
    forward: float
    backward: float
    constants: float


def measure_loss(loss: Loss) -> LossCost:
    """Run the loss on one block of random logits."""
    generator = torch.Generator().manual_seed(0)
    loss = loss.prepare(_any_classes(generator))
    logits = torch.randn(_ROWS, _CLASSES, generator=generator)
    classes = torch.arange(_CLASSES)
    labels = torch.randint(_CLASSES, (_ROWS,), generator=generator)
    leaf = logits.requires_grad_()
    with Ledger([logits, classes, labels]) as ledger:
        view = Block.of(classes, labels, labels, leaf, _weights(loss))
        with torch.enable_grad():
            work = BlockWork(leaf, view, loss.statistics(leaf, view))
        kept, forward = ledger.live, sum(each.bytes for each in ledger.work)
        ledger.work = []
        gradient = work.gradient_of_logits(tuple(torch.ones_like(stat) for stat in work.stats))
        backward = sum(each.bytes for each in ledger.work)
    del gradient
    per = logits.numel()
    identity = loss.identity(torch.zeros(1))
    return LossCost(
        width=sum(stat.numel() for stat in identity),
        couples_rows=loss.couples_rows,
        kept=kept / per,
        peak=ledger.peak / per,
        forward=forward / per,
        backward=backward / per,
        constants=_constant_bytes(loss) / _CLASSES,
    )


def _any_classes(generator: torch.Generator) -> ClassFacts:
    return ClassFacts(
        _CLASSES,
        counts=torch.ones(_CLASSES),
        label_vectors=torch.randn(_CLASSES, _VECTOR_DIM, generator=generator),
        tree=LabelTree.dense(_CLASSES),
    )


def _weights(loss: Loss) -> Tensor | None:
    sampled = loss.sampled(_CLASSES, _ROWS) is not None
    return torch.ones(_CLASSES, dtype=torch.float64) if sampled else None


def _constant_bytes(loss: Loss) -> int:
    return sum(each.numel() * each.itemsize for each in loss.constants().values())

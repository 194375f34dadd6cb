"""Cost of a factored head's step with many and with few classes, compared with a dense head.

A step consists of forward, backward and update. Labels are drawn from all classes, so with many
classes, the rows that a step touches are usually not in the CPU cache. The cost and frequency of
consolidations are measured separately.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim import SGD

from benchmarks.timing import Row, ratio_row, take_turns
from heads import ClassHead, FactoredHead
from heads.losses import LOSSES, Quadratic, SphericalSoftmax
from heads.losses.spherical import SphericalLoss

FEW, MANY = 10_000, 4_000_000
DIM, BATCH = 128, 64
_RATE, _DECAY = 0.1, 5e-4
_RUN_STEPS = 300


def rows() -> Iterator[Row]:
    """Compare factored steps with many and with few classes, and a dense step.

    Also time a consolidation.
    """
    few, many = (FactoredHead(DIM, classes, SphericalSoftmax()) for classes in (FEW, MANY))
    plain = ClassHead(DIM, FEW, SphericalSoftmax(), bias=False)
    contenders = {
        "few": lambda: _factored_step(few),
        "many": lambda: _factored_step(many),
        "plain": _plain_step(plain),
    }
    times = take_turns(contenders, title="factored", rounds=300, seconds=30)
    case = f"d = {DIM}, B = {BATCH}, spherical_softmax"
    what = f"factored step, K = {MANY:,} / K = {FEW:,}"
    yield ratio_row(what, case, times["many"], times["few"], 1.3)
    what = f"factored step / dense step and SGD, K = {FEW:,}"
    yield ratio_row(what, case, times["few"], times["plain"])
    yield _consolidation(many)


def _factored_step(head: FactoredHead) -> None:
    features, labels = _batch(head.num_classes)
    head(features, labels).backward()
    head.step(_RATE, _DECAY)


def _plain_step(head: ClassHead) -> Callable[[], None]:
    sgd = SGD(head.parameters(), lr=_RATE, weight_decay=_DECAY)

    def step() -> None:
        sgd.zero_grad()
        head(*_batch(head.num_classes)).backward()
        sgd.step()

    return step


def _batch(classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, DIM, requires_grad=True), torch.randint(classes, (BATCH,))


def _consolidation(head: FactoredHead) -> Row:
    """Time a consolidation and the next forward pass, which computes Q and s from all rows.

    The details list how many consolidations occur in a run.
    """
    started = time.perf_counter()
    head.consolidate()
    head(*_batch(head.num_classes))
    seconds = time.perf_counter() - started
    family = [k for k, each in LOSSES.items() if issubclass(each, SphericalLoss | Quadratic)]
    counts = [f"{kind} {_count(kind, -torch.inf)}, {_count(kind, 0.0)}" for kind in family]
    return Row(
        "factored head: one consolidation",
        f"K = {MANY:,}, d = {DIM}",
        f"{seconds:.1f} s",
        "",
        f"number in {_RUN_STEPS} steps with lr {_RATE} on centered features and on ReLU features: "
        + "; ".join(counts),
    )


def _count(kind: str, lowest: float) -> int:
    """Count the consolidations in a run on features of norm 3 with one cluster per class.

    Features are clamped to at least `lowest`.
    """
    head = FactoredHead(DIM, FEW, LOSSES[kind]())
    centers = torch.randn(FEW, DIM)
    for _ in range(_RUN_STEPS):
        labels = torch.randint(FEW, (BATCH,))
        features = centers[labels] + 0.3 * torch.randn(BATCH, DIM)
        head(3 * normalize(features.clamp(min=lowest)), labels).backward()
        head.step(_RATE, _DECAY)
    return head.num_consolidations

"""How a strategy spreads the backbone, as numbers: `trainer/strategies/` for those who plan.

Sizes are in bytes of float32 weights on the fullest rank; collectives were read off real steps
(`tests/launch/test_plan_measured.py` holds them against each other).
"""

from dataclasses import dataclass
from typing import Any

from launch.plan.cluster import Cluster
from launch.plan.network import Network
from launch.plan.traffic import Collective, Phase
from trainer.config import Recipe

_FLOAT32 = 4
_DDP_BUCKET = 25 << 20
# DeepSpeed's own defaults: how many weights stay gathered, and numbers of its bucket of gradients.
_ZERO_MAX_LIVE = 1_000_000_000
_ZERO_BUCKET = 500_000_000


@dataclass(frozen=True)
class Spread:
    """Bytes of a rank: `weights` and `gradients` that last, what the optimizer updates (`updated`),
    the strategy's own `buckets`, and what is `gathered` only while backward runs."""

    weights: int
    gradients: int
    updated: int
    buckets: int
    gathered: int
    collectives: tuple[Collective, ...]


def spread(
    recipe: Recipe, network: Network, cluster: Cluster, *, passes: int, parts: int
) -> Spread:
    """Of the recipe's strategy; `passes` are the forwards of a step, those without graph included,
    `parts` those with one."""
    whole = network.numel * _FLOAT32
    strategy = recipe.train.strategy
    if cluster.ranks == 1:
        return Spread(whole, whole, whole, 0, 0, ())
    match strategy.kind:
        case "ddp":
            return _ddp(whole)
        case "fsdp":
            return _fsdp(strategy, network, cluster.ranks, passes, parts)
        case "deepspeed":
            return _zero(strategy.stage, network, cluster.ranks, passes, parts)


def _ddp(whole: int) -> Spread:
    collectives = [_sum("DDP: gradients", whole, messages=-(-whole // _DDP_BUCKET))]
    return Spread(whole, whole, whole, whole, 0, tuple(collectives))


def _fsdp(strategy: Any, network: Network, ranks: int, passes: int, parts: int) -> Spread:
    padded = [
        sum(_padded(shape, ranks) for shape in unit.shapes) * _FLOAT32 for unit in network.units
    ]
    piece, again = sum(padded) // ranks, strategy.reshard_after_forward
    # The root, the block at work and the next one; or all of them from forward to backward.
    largest = sorted(padded[:-1], reverse=True)[:2]
    gathered = padded[-1] + sum(largest) if again else sum(padded)
    # Its gradients, whole, and the copy of them that is reduced.
    gathered += 2 * max(padded)
    forward_calls = passes if again else parts
    collectives = [_gather("FSDP: weights", sum(padded), "forward", forward_calls)]
    if again:
        collectives.append(_gather("FSDP: weights again", sum(padded), "backward", parts))
    gradients = Collective(
        "FSDP: gradients", "reduce_scatter", "world", sum(padded), "backward", parts, hidden=True
    )
    return Spread(piece, piece, piece, 0, gathered, (*collectives, gradients))


def _zero(stage: int, network: Network, ranks: int, passes: int, parts: int) -> Spread:
    whole = network.numel * _FLOAT32
    piece = -(-whole // ranks)
    if stage == 0:
        return Spread(whole, whole, whole, 0, 0, (_sum("ZeRO: gradients", whole),))
    bucket = min(_ZERO_BUCKET, network.numel) * _FLOAT32
    if stage < 3:
        # Stage 2 keeps sums of each part, stage 1 waits for the last.
        sums = _sum("ZeRO: gradients", whole, calls=parts if stage == 2 else 1)
        updated = _gather("ZeRO: updated weights", whole, "optimizer", 1)
        kept = piece if stage == 2 else whole
        return Spread(whole + piece, kept, piece, 0, bucket, (sums, updated))
    collectives = [_gather("ZeRO: weights", whole, "forward", passes)]
    if network.numel > _ZERO_MAX_LIVE:
        collectives.append(_gather("ZeRO: weights again", whole, "backward", parts))
    scattered = Collective(
        "ZeRO: gradients", "reduce_scatter", "world", whole, "backward", parts, hidden=True
    )
    return Spread(2 * piece, piece, piece, bucket, whole, (*collectives, scattered))


def _sum(what: str, size: int, calls: int = 1, messages: int = 1) -> Collective:
    return Collective(
        what, "all_reduce", "world", size, "backward", calls, hidden=True, messages=messages
    )


def _gather(what: str, size: int, phase: Phase, calls: int, messages: int = 1) -> Collective:
    hidden = phase != "optimizer"
    return Collective(
        what, "all_gather", "world", size, phase, calls, hidden=hidden, messages=messages
    )


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Numbers of a weight whose rows are dealt out to all ranks alike."""
    rows, *rest = shape or (1,)
    numel = -(-rows // ranks) * ranks
    for size in rest:
        numel *= size
    return numel

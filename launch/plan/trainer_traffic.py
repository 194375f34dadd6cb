"""What the trainer's own parts exchange in a step: batch norm's statistics and the odd number."""

from collections.abc import Iterable

from launch.plan.cluster import Cluster
from launch.plan.network import Network
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32, Collective, Operation, Phase

_AGREED = 3 * 8  # of a rank, `trainer/steps/agreement.py`
_FLOAT64 = 8


def batch_norm_traffic(
    network: Network, cluster: Cluster, *, passes: int, parts: int
) -> list[Collective]:
    """Synchronised statistics of each layer, over all ranks: mean, variance and count forward, two
    sums backward (`trainer/backbone/batch_norm.py`; on CUDA torch's SyncBatchNorm, with one count a
    rank)."""
    cuda = cluster.machine.kind == "cuda"

    def statistics(channels: Iterable[int]) -> int:
        numbers = sum(2 * c + 1 if cuda else 3 * c for c in channels)
        return cluster.ranks * numbers * FLOAT32

    def collective(
        operation: Operation,
        size: int,
        phase: Phase,
        calls: int,
        layers: int,
        what: str = "batch norm",
    ) -> Collective:
        return Collective(what, operation, "world", size, phase, calls, messages=layers)

    norms, again = network.batch_norms, network.norms_again
    sums = 2 * sum(norms) * FLOAT32
    parts_of = [
        collective("all_gather", statistics(norms), "forward", passes, len(norms)),
        collective(
            "all_gather", statistics(again), "backward", parts, len(again), "batch norm again"
        ),
        collective("all_reduce", sums, "backward", parts, len(norms)),
    ]
    return [part for part in parts_of if part.bytes]


def first_rank_traffic(recipe: Recipe, network: Network) -> list[Collective]:
    """Statistics of local batch norms, which follow the first rank's once a step."""
    if recipe.backbone.batch_norm != "local" or not network.buffers:
        return []
    what = "batch norm: statistics of rank 0"
    return [Collective(what, "broadcast", "world", network.buffers, "backward")]


def odd_numbers(
    recipe: Recipe, network: Network, cluster: Cluster, *, parts: int
) -> list[Collective]:
    """What ranks agree on, the gradient's norm over the shards, the weights of micro-batches."""
    agreed = cluster.ranks * _AGREED
    scalar = [
        Collective("agreement", "all_gather", "world", agreed, "step"),
        Collective("norm of the head", "all_reduce", "class", _FLOAT64, "optimizer"),
    ]
    strategy = recipe.train.strategy
    if strategy.shards_updates:
        scalar.append(
            Collective("norm of the backbone", "all_reduce", "world", _FLOAT64, "optimizer")
        )
    if recipe.optimizer.needs_whole_tensors:
        what, pair = "norms of weights", 2 * FLOAT32  # of a weight that decays, and of its step
        scalar.append(Collective(what, "all_reduce", "class", pair, "optimizer"))
        if strategy.weights_are_dtensors:
            pairs = pair * sum(len(shape) > 1 for shape in network.shapes)
            scalar.append(Collective(what, "all_reduce", "world", pairs, "optimizer"))
    if parts > 1:
        what = "weights of micro-batches"
        scalar.append(Collective(what, "all_reduce", "world", parts * FLOAT32, "forward"))
    return scalar

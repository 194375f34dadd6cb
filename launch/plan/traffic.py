"""The collectives of the head, of batch norm and of the trainer in a step.

The head's collectives are in `heads/engine/engine.py` and `heads/factored.py`. Those of the
strategy are not included.
"""

from collections.abc import Iterable

from heads.engine.global_loss import reduces
from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster
from launch.plan.head_cost import HeadShape
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32, Collective, Operation, Phase

_INT64 = _FLOAT64 = 8
_SIZES = 8  # integers that a rank sends in `Engine.agree`
_WEIGHT_NORMS = "norms of weights"
_NORMS = 2 * FLOAT32  # the norms of a decayed weight and of its update
_AGREED = 3 * 8  # bytes that a rank sends in `trainer/agreement.py`


def engine_traffic(shape: HeadShape, cluster: Cluster) -> list[Collective]:
    """Return the traffic of a step of `ClassHead`.

    The head gathers labels, features and statistics, and reduces gradients.
    """
    group, world = cluster.class_ranks * shape.rows, shape.world_rows
    width, dim, calls = shape.loss.width, shape.dim, shape.calls
    parts = [
        ("head: sizes", "all_gather", "class", cluster.class_ranks * _SIZES * _INT64),
        ("head: sizes", "all_gather", "data", cluster.data_ranks * _SIZES * _INT64),
        ("head: labels", "all_gather", "class", group * _INT64),
        ("head: labels", "all_gather", "data", world * _INT64),
        ("head: features", "all_gather", "class", group * dim * shape.itemsize),
        ("head: boundary rows", "all_reduce", "class", _boundary(shape)),
        *_statistics(shape, cluster.class_ranks),
        ("head: statistics", "all_gather", "data", world * width * FLOAT32),
        ("head: boundary gradients", "all_reduce", "class", _boundary(shape)),
        ("head: feature gradients", "reduce_scatter", "class", group * dim * FLOAT32),
    ]
    if shape.row_weights:
        parts += [
            ("head: row weights", "all_gather", "class", group * FLOAT32),
            ("head: row weights", "all_gather", "data", world * FLOAT32),
        ]
    once = Collective(
        "head: weight gradients",
        "all_reduce",
        "data",
        shape.float32_gradients,
        phase="head",
    )
    each = [Collective(*part, phase="head", calls=calls) for part in parts]  # type: ignore[arg-type]
    return [*each, once]


def factored_traffic(shape: HeadShape, cluster: Cluster) -> list[Collective]:
    """Return the traffic of a step of `FactoredHead`.

    The head sends d x d sums instead of the gradients of its weights.
    """
    group, world = cluster.class_ranks * shape.rows, shape.world_rows
    dim, calls = shape.dim, shape.calls
    square = (dim + 1) * dim * _FLOAT64
    figures = (4 + shape.row_weights) * _FLOAT64
    features = dim * shape.feature_itemsize
    each_call = [
        ("head: sizes", "all_gather", "class", cluster.class_ranks * _SIZES * _INT64),
        ("head: sizes", "all_gather", "data", cluster.data_ranks * _SIZES * _INT64),
        ("head: agreement", "all_reduce", "class", _INT64),
        ("head: agreement", "all_reduce", "data", _INT64),
        ("head: labels", "all_gather", "class", group * _INT64),
        ("head: labels' rows", "reduce_scatter", "class", group * dim * _FLOAT64),
        ("head: statistics", "all_gather", "class", group * figures),
        ("head: statistics", "all_gather", "data", world * figures),
        ("head: labels of the gradient", "all_gather", "class", group * _INT64),
        ("head: labels of the gradient", "all_gather", "data", world * _INT64),
        ("head: gradients of statistics", "all_gather", "class", group * _FLOAT64),
        ("head: gradients of statistics", "all_gather", "data", world * _FLOAT64),
        ("head: features of the gradient", "all_gather", "class", group * features),
        ("head: features of the gradient", "all_gather", "data", world * features),
    ]
    each_step = [
        ("head: sums of the gradient", "all_reduce", "class", square),
        ("head: sums of the gradient", "all_reduce", "data", square),
        ("head: sums of the labels' rows", "all_reduce", "class", square),
    ]
    return [Collective(*part, phase="head", calls=calls) for part in each_call] + [  # type: ignore[arg-type]
        Collective(*part, phase="optimizer")  # type: ignore[arg-type]
        for part in each_step
    ]


def _boundary(shape: HeadShape) -> int:
    return shape.classes.boundary * shape.per_node * FLOAT32


def _statistics(shape: HeadShape, class_ranks: int) -> list[tuple[str, str, str, int]]:
    """Return the exchange of statistics in a class group (`heads/engine/global_loss.py`)."""
    size, shifts = shape.group_rows * shape.loss.width * FLOAT32, shape.loss.shifts
    if shifts is not None:
        shift_bytes = shape.group_rows * shifts * FLOAT32
        if reduces(class_ranks, size, shift_bytes):
            parts = [("head: statistics", "all_reduce", "class", size)]
            if shifts:
                parts.append(("head: maxima of statistics", "all_reduce", "class", shift_bytes))
            return parts
    return [("head: statistics", "all_gather", "class", class_ranks * size)]


def batch_norm_traffic(
    backbone: BackboneCost, cluster: Cluster, *, passes: int, parts: int
) -> list[Collective]:
    """Return the traffic of batch norm that is synchronized across all ranks.

    Each layer sends mean, variance and count in forward, and two sums in backward
    (`trainer/backbone/batch_norm.py`).
    """

    def statistics(channels: Iterable[int]) -> int:
        numbers = sum(2 * c + 1 for c in channels)
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

    norms, again = backbone.batch_norms, backbone.norms_again
    sums = 2 * sum(norms) * FLOAT32
    parts_of = [
        collective("all_gather", statistics(norms), "forward", passes, len(norms)),
        collective(
            "all_gather", statistics(again), "backward", parts, len(again), "batch norm again"
        ),
        collective("all_reduce", sums, "backward", parts, len(norms)),
    ]
    return [part for part in parts_of if part.bytes]


def first_rank_traffic(recipe: Recipe, backbone: BackboneCost) -> list[Collective]:
    """Return the traffic of local batch norm: rank 0 broadcasts its statistics once per step."""
    if recipe.backbone.batch_norm != "local" or not backbone.buffers:
        return []
    what = "batch norm: statistics of rank 0"
    return [Collective(what, "broadcast", "world", backbone.buffers, "backward")]


def scalar_traffic(recipe: Recipe, cluster: Cluster, *, parts: int) -> list[Collective]:
    """Return the traffic of step agreement, of norms of the head and of the weights of
    micro-batches."""
    agreed = cluster.ranks * _AGREED
    scalar = [
        Collective("agreement", "all_gather", "world", agreed, "step"),
        Collective("norm of the head", "all_reduce", "class", _FLOAT64, "optimizer"),
    ]
    if recipe.optimizer.needs_whole_tensors:
        scalar.append(Collective(_WEIGHT_NORMS, "all_reduce", "class", _NORMS, "optimizer"))
    if parts > 1:
        what = "weights of micro-batches"
        scalar.append(Collective(what, "all_reduce", "world", parts * FLOAT32, "forward"))
    return scalar


def norm_traffic(recipe: Recipe, backbone: BackboneCost) -> list[Collective]:
    """Return the traffic of norms of the backbone, if the strategy shards it."""
    strategy, norms = recipe.train.strategy, []
    if strategy.shards_updates:
        what = "norm of the backbone"
        norms.append(Collective(what, "all_reduce", "shard", _FLOAT64, "optimizer"))
    if recipe.optimizer.needs_whole_tensors and strategy.weights_are_dtensors:
        size = _NORMS * sum(len(shape) > 1 for shape in backbone.shapes)
        norms.append(Collective(_WEIGHT_NORMS, "all_reduce", "shard", size, "optimizer"))
    return norms

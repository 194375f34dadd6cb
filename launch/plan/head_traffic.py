"""What the head's ranks exchange in a step: `heads/engine.py`, `heads/factored.py` as numbers."""

from launch.plan.cluster import Cluster
from launch.plan.head_shape import FLOAT32, HeadShape
from trainer.strategies.cost import Collective

_INT64 = _FLOAT64 = 8
_SIZES = 8  # what `Engine.agree` sends of a rank


def engine_traffic(shape: HeadShape, cluster: Cluster) -> list[Collective]:
    """One step of `ClassHead`: labels, features and statistics out, gradients back."""
    group, world = cluster.class_ranks * shape.rows, shape.world_rows
    width, dim, calls = shape.loss.width, shape.dim, shape.calls
    parts = [
        ("head: sizes", "all_gather", "class", cluster.class_ranks * _SIZES * _INT64),
        ("head: sizes", "all_gather", "data", cluster.data_ranks * _SIZES * _INT64),
        ("head: labels", "all_gather", "class", group * _INT64),
        ("head: labels", "all_gather", "data", world * _INT64),
        ("head: features", "all_gather", "class", group * dim * shape.itemsize),
        ("head: boundary rows", "all_reduce", "class", _boundary(shape)),
        ("head: statistics", "all_gather", "class", cluster.class_ranks * _stats(shape)),
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
        shape.shard,
        phase="head",
    )
    each = [Collective(*part, phase="head", calls=calls) for part in parts]  # type: ignore[arg-type]
    return [*each, once]


def factored_traffic(shape: HeadShape, cluster: Cluster) -> list[Collective]:
    """One step of `FactoredHead`, whose weights' gradients never travel: d x d sums do."""
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


def _stats(shape: HeadShape) -> int:
    return shape.group_rows * shape.loss.width * FLOAT32

"""Builds selected ranks of a cluster in this process, one by one, to show and check their shards.

torch's fake process group replaces the other ranks. The meshes, the groups and the FSDP strategy
are real but use meta tensors. For dense class weights, no tensor of size K is allocated.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data.loading.order import share
from heads.dtensors import sharded_rows
from heads.weights import shard_range
from launch.plan.classes import Classes, classes_of, shards_of
from launch.plan.fake_world import fake_world
from launch.plan.plan import PlanRequest
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.config import Recipe
from trainer.strategies.base import Strategy
from trainer.world import World, mesh_shape


@dataclass(frozen=True)
class RankShape:
    """One rank: its coordinates, rows of the head, weights of the backbone and samples per step."""

    rank: int
    node: int
    data: int
    class_: int
    head_rows: tuple[int, int]
    backbone_numel: int
    samples: tuple[int, int]


@dataclass(frozen=True)
class Ranks:
    """Selected ranks of a world of `size` ranks, and the totals over all of them."""

    size: int
    mesh: tuple[int, int]
    nodes_of_tree: int
    dim: int
    backbone_numel: int
    global_batch: int
    ranks: tuple[RankShape, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dry_run(recipe: Recipe, request: PlanRequest) -> Ranks:
    """Build the first, middle and last ranks, and the rank with the fewest classes.

    Raises ValueError, as training would, if the class group does not divide the ranks, or if the
    shards of the ranks do not add up to the full size.
    """
    size = request.nodes * request.gpus
    shape = mesh_shape(recipe.train.class_group, size=size, local_size=request.gpus)
    classes = classes_of(recipe, shards_of(recipe), request.classes, class_ranks=shape[1])
    _check_sums(recipe, classes, shape[1], size)
    chosen = sorted({0, size // 2, _fewest(classes, shape[1]), size - 1})
    with torch.device("meta"):
        whole = build_backbone(recipe.backbone.without_weights(), image=recipe.data.image)
    return Ranks(
        size=size,
        mesh=shape,
        nodes_of_tree=classes.nodes,
        dim=whole.dim,
        backbone_numel=sum(p.numel() for p in whole.parameters()),
        global_batch=recipe.train.global_batch,
        ranks=tuple(_build(recipe, request, classes, whole.dim, rank, shape) for rank in chosen),
    )


def show(ranks: Ranks, console: Console) -> None:
    """Print one row per rank."""
    title = f"{ranks.size} ranks, mesh data {ranks.mesh[0]} x class {ranks.mesh[1]}"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("rank", "node", "data", "class", "head rows", "backbone weights", "samples per step")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for rank in ranks.ranks:
        start, stop = rank.head_rows
        begin, end = rank.samples
        table.add_row(
            *(f"{n:,}" for n in (rank.rank, rank.node, rank.data, rank.class_)),
            f"{start:,} to {stop:,} ({stop - start:,})",
            f"{rank.backbone_numel:,}",
            f"{begin:,} to {end:,} ({end - begin:,})",
        )
    console.print(table)
    console.print(
        Text(
            f"total: {ranks.nodes_of_tree:,} x {ranks.dim} head weights per class group, "
            f"{ranks.backbone_numel:,} backbone weights, {ranks.global_batch:,} samples per step"
        )
    )


def _build(
    recipe: Recipe,
    request: PlanRequest,
    classes: Classes,
    dim: int,
    rank: int,
    shape: tuple[int, int],
) -> RankShape:
    with fake_world(shape, rank=rank, local_size=request.gpus) as world:
        with torch.device("meta"):
            backbone = build_backbone(recipe.backbone.without_weights(), image=recipe.data.image)
        pieces = _strategy(recipe, backbone, world).live()
        data, class_ = (0, 0) if world.mesh is None else _coordinate(world)
        start, stop = shard_range(classes.nodes, class_, shape[1])
        _check_shard(world, start, stop, classes.nodes, dim)
        samples = share(recipe.train.global_batch, rank, world.size)
        return RankShape(
            rank=rank,
            node=rank // request.gpus,
            data=data,
            class_=class_,
            head_rows=(start, stop),
            backbone_numel=sum(piece.numel() for piece in pieces.values()),
            samples=(samples.start, samples.stop),
        )


def _strategy(recipe: Recipe, backbone: Backbone, world: World) -> Strategy:
    """Return the recipe's strategy if its weights are DTensors, otherwise the base strategy."""
    config = recipe.train.strategy
    if world.size == 1 or not config.weights_are_dtensors:
        return Strategy(backbone)
    return config.start(backbone, world)


def _coordinate(world: World) -> tuple[int, int]:
    assert world.mesh is not None
    coordinate = world.mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[0], coordinate[1]


def _check_shard(world: World, start: int, stop: int, nodes: int, dim: int) -> None:
    """Check that a checkpoint could store the head's rows as a `Shard(0)` DTensor."""
    if world.mesh is None:
        return
    rows: Tensor = torch.empty(stop - start, dim, device="meta")
    whole = torch.Size((nodes, dim))
    assert sharded_rows(rows, world.mesh["class"], whole).shape == whole


def _check_sums(recipe: Recipe, classes: Classes, class_ranks: int, size: int) -> None:
    rows = [shard_range(classes.nodes, rank, class_ranks) for rank in range(class_ranks)]
    samples = [len(share(recipe.train.global_batch, rank, size)) for rank in range(size)]
    if sum(stop - start for start, stop in rows) != classes.nodes:
        raise ValueError(f"the shards of the head do not add up to {classes.nodes} rows: {rows}")
    if sum(samples) != recipe.train.global_batch:
        raise ValueError(f"the ranks' samples do not add up to train.global_batch: {samples}")


def _fewest(classes: Classes, class_ranks: int) -> int:
    """Return the first rank that has the smallest shard."""

    def size(rank: int) -> int:
        start, stop = shard_range(classes.nodes, rank, class_ranks)
        return stop - start

    return min(range(class_ranks), key=size)

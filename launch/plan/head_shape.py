"""The head in numbers: shard, rows of a call, blocks, and what backward need not compute again."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heads.config import HeadConfig
from heads.logits import LogitMap
from heads.step import Kept, Step
from launch.plan.classes import Classes
from launch.plan.cluster import Cluster
from launch.plan.loss_cost import LossCost
from launch.plan.network import Network
from trainer.config import Recipe

FLOAT32 = 4


@dataclass(frozen=True)
class HeadShape:
    """One call of the head on the fullest rank; `calls` of them are made in a step.

    `rows` are this rank's, `group_rows` and `world_rows` those of its class group and of all.
    `nodes` are its vectors of `dim` numbers (`per_node` with the bias), `computed` the classes that
    a step computes of them, in `blocks` of `block_classes`. `graphs`: the blocks' graphs are all
    kept; otherwise
    `kept_numbers` logits are, which spare `kept_share` of the work of making them again.
    `normalizes`: the rows of a block are divided by their norms.
    `itemsize` is that of products, `feature_itemsize` of the features.
    """

    classes: Classes
    loss: LossCost
    calls: int
    rows: int
    group_rows: int
    world_rows: int
    row_weights: bool
    nodes: int
    dim: int
    per_node: int
    normalizes: bool
    computed: int
    blocks: int
    block_classes: int
    graphs: bool
    kept_numbers: int
    kept_share: float
    itemsize: int
    feature_itemsize: int

    @property
    def logits(self) -> int:
        """Of a call on this rank."""
        return self.group_rows * self.computed

    @property
    def shard(self) -> int:
        """Bytes of this rank's rows and their bias."""
        return self.nodes * self.per_node * FLOAT32


def head_shape(
    recipe: Recipe, network: Network, classes: Classes, loss: LossCost, cluster: Cluster
) -> HeadShape:
    """What the engine would make of the recipe on the fullest rank."""
    train, group = recipe.train, cluster.class_ranks
    share = -(-train.global_batch // cluster.ranks)
    parts = min(train.micro_batches, share)
    calls = 1 if loss.couples_rows else parts
    mixed = recipe.data.augment.mix is not None
    rows = -(-share // calls) * (2 if mixed else 1)
    group_rows = min(rows * group, train.global_batch * (2 if mixed else 1))
    half = train.precision != "fp32"
    itemsize = 2 if half else network.feature_itemsize
    computed = _computed(recipe.head, classes, group, rows * cluster.ranks)
    plan = _Blocks.cut(
        group_rows,
        network.dim,
        computed,
        plain=classes.plain,
        logit_map=recipe.head.logits,
        memory_bytes=recipe.head.memory_mib << 20,
        half=half,
        cuda=cluster.machine.kind == "cuda",
    )
    return HeadShape(
        classes=classes,
        loss=loss,
        calls=calls,
        rows=rows,
        group_rows=group_rows,
        world_rows=group_rows * cluster.data_ranks,
        row_weights=mixed,
        nodes=classes.held(group),
        dim=network.dim,
        per_node=network.dim + recipe.head.bias,
        normalizes=recipe.head.logits.normalizes,
        computed=computed,
        blocks=plan.num,
        block_classes=min(plan.classes, computed),
        graphs=plan.graphs,
        kept_numbers=plan.kept_numbers,
        kept_share=plan.kept_share,
        itemsize=itemsize,
        feature_itemsize=network.feature_itemsize,
    )


def _computed(head: HeadConfig, classes: Classes, group: int, world_rows: int) -> int:
    """Classes of a rank that a training step computes: all, or what the loss draws of them."""
    held = classes.held_classes(group)
    if head.loss.over_nodes:
        return classes.held(group)  # the siblings of a batch's paths; no more than all
    sampled = head.loss.sampled(classes.num_classes, world_rows)
    return held if sampled is None else min(held, math.ceil(sampled / group))


@dataclass(frozen=True)
class _Blocks:
    num: int
    classes: int
    graphs: bool
    kept_numbers: int
    kept_share: float

    @classmethod
    def cut(
        cls,
        rows: int,
        dim: int,
        computed: int,
        *,
        plain: bool,
        logit_map: LogitMap,
        memory_bytes: int,
        half: bool,
        cuda: bool,
    ) -> "_Blocks":
        """By the engine's own rules, on features without memory."""
        compute = torch.bfloat16 if half else torch.float32
        with FakeTensorMode():
            features = torch.empty(rows, dim, dtype=compute, device="meta" if cuda else "cpu")
            step = _step(features, _Weights(plain), logit_map, memory_bytes)
            size = step.classes_at_once()
            blocks: list[Any] = [
                _Sized(range(start, min(start + size, computed)))
                for start in range(0, computed, size)
            ]
            kept = Kept(step, blocks, with_grad=True)
            buffer = kept.place(0)
            numbers = 0 if buffer is None else buffer.numel()
        # One block's place is for those that are not kept.
        lasting = numbers - (rows * min(size, computed) if numbers < rows * computed else 0)
        share = 1.0 if kept.graphs else lasting / max(1, rows * computed)
        return cls(len(blocks), size, kept.graphs, numbers, share)


@dataclass(frozen=True)
class _Weights:
    is_plain: bool


@dataclass(frozen=True)
class _Sized:
    class_ids: range


def _step(features: torch.Tensor, weights: Any, logit_map: LogitMap, memory_bytes: int) -> Step:
    nothing: Any = None
    return Step(
        weights=weights,
        loss=nothing,
        logit_map=logit_map,
        memory_bytes=memory_bytes,
        features_Gd=features,
        labels_G=nothing,
        rows=nothing,
        bias=nothing,
        offset=nothing,
        log_prior=nothing,
        margins=nothing,
        choice=None,
        compute_dtype=features.dtype,
        stats_dtype=torch.promote_types(features.dtype, torch.float32),
    )

"""The shape of the head: its shard, rows per call, blocks, and the memory saved for backward.

The loss's memory per logit is measured on one small block.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from heads.build import ROW_DTYPES
from heads.config import HeadConfig
from heads.engine.block_size import Processor
from heads.engine.blockwise import BlockwiseLogits
from heads.engine.torch_walk import ComputedBlock, SavedBlocks
from heads.logits import LogitMap
from heads.losses import Block, ClassFacts, Loss, Reduction, Stats
from heads.rows.node_values import FP8, NodeValues
from heads.tree import LabelTree
from launch.plan.backbone_cost import BackboneCost
from launch.plan.classes import Classes
from launch.plan.cluster import Cluster
from launch.plan.operations import OperationRecorder
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32

# Large enough that costs independent of the block size are negligible, and small enough to run in a
# few milliseconds.
_ROWS, _CLASSES = 256, 2048
_VECTOR_DIM = 300
_SCALE = 2  # bytes


@dataclass(frozen=True)
class LossCost:
    """The memory of a loss in bytes per logit, in addition to the float32 logit itself.

    width: numbers per row that ranks exchange. shifts: how many of them are logsumexps, or None if
    they cannot be merged by all-reduces. kept: bytes that the graph saves for backward.
    peak: largest number of live bytes during forward and backward of a block. constants: bytes per
    class that the loss stores.
    """

    width: int
    shifts: int | None
    kept: float
    peak: float
    constants: float


def measure_loss(loss: Loss) -> LossCost:
    """Run the loss on one block of random logits."""
    generator = torch.Generator().manual_seed(0)
    loss = loss.prepare(_any_classes(generator))
    logits = torch.randn(_ROWS, _CLASSES, generator=generator)
    classes = torch.arange(_CLASSES)
    labels = torch.randint(_CLASSES, (_ROWS,), generator=generator)
    leaf = logits.requires_grad_()
    with OperationRecorder([logits, classes, labels]) as recorder:
        view = Block.of(classes, labels, labels, leaf, _weights(loss))
        with torch.enable_grad():
            work = ComputedBlock(leaf, view, loss.statistics(leaf, view))
        kept = recorder.live
        grads = tuple(torch.ones_like(stat) for stat in work.stats)
        gradient = work.gradient_of_logits(work.stats, grads)
    del gradient
    per = logits.numel()
    identity = loss.identity(torch.zeros(1))
    return LossCost(
        width=sum(stat.numel() for stat in identity),
        shifts=_num_logsumexps(loss, identity),
        kept=kept / per,
        peak=recorder.peak / per,
        constants=_constant_bytes(loss) / _CLASSES,
    )


def _num_logsumexps(loss: Loss, identity: Stats) -> int | None:
    if not loss.reductions:
        return None
    pairs = zip(loss.reductions, identity, strict=True)
    return sum(stat.numel() for reduction, stat in pairs if reduction is Reduction.LOGSUMEXP)


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


@dataclass(frozen=True)
class HeadShape:
    """One of the `calls` to the head in a step, on the rank with the largest shard.

    rows, group_rows, world_rows: rows of this rank, of its class group and of all ranks.
    nodes: this rank's weight vectors, of `dim` numbers each (`per_node` with the bias).
    normalizes: the vectors of a block are divided by their norms.
    memory_mib: memory limit for logits.
    computed: classes of this rank whose logits a step computes, in `blocks` of `block_classes`.
    graphs: the graphs of all blocks are kept until backward. Otherwise, a buffer of `kept_numbers`
    logits is kept, and backward does not recompute the logits of the first `saved` blocks.
    itemsize: bytes per number in matrix products; feature_itemsize: bytes per number in features.
    row_dtype: format of the weight vectors. fused: whether they are updated without a gradient.
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
    memory_mib: int
    computed: int
    blocks: int
    block_classes: int
    graphs: bool
    kept_numbers: int
    saved: int
    itemsize: int
    feature_itemsize: int
    row_dtype: torch.dtype
    fused: bool

    @property
    def logits(self) -> int:
        """Number of logits that one call computes on this rank."""
        return self.group_rows * self.computed

    @property
    def shard(self) -> int:
        """Bytes of this rank's weight vectors, with the scales of fp8 vectors, and their bias."""
        scale = _SCALE if self.row_dtype == FP8 else 0
        return self.nodes * (self.dim * self.row_dtype.itemsize + self._bias + scale)

    @property
    def moment(self) -> int:
        """Bytes of a moment of the weight vectors and their bias."""
        return 0 if self.fused else self.nodes * (self.dim * self.row_dtype.itemsize + self._bias)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the weight vectors and their bias until the update. With fused
        updates, only the inner nodes of a tree have gradients."""
        if not self.fused:
            return self.moment
        share = self.classes.inner / self.classes.nodes
        return self.nodes * self._bias + int(self.nodes * share) * self.dim * FLOAT32

    @property
    def float32_gradients(self) -> int:
        """Bytes of the gradients of all weight vectors and their bias in float32."""
        return self.nodes * self.per_node * FLOAT32

    @property
    def _bias(self) -> int:
        return (self.per_node - self.dim) * FLOAT32


def head_shape(
    recipe: Recipe, backbone: BackboneCost, classes: Classes, loss: LossCost, cluster: Cluster
) -> HeadShape:
    """Return the head as the engine would run it on the rank with the largest shard."""
    train, group = recipe.train, cluster.class_ranks
    share = -(-train.global_batch // cluster.ranks)
    parts = min(train.micro_batches, share)
    calls = 1 if recipe.calls_head_once else parts
    mixed = recipe.data.augment.mix is not None
    rows = -(-share // calls) * (2 if mixed else 1)
    group_rows = min(rows * group, train.global_batch * (2 if mixed else 1))
    half = train.precision != "fp32"
    itemsize = 2 if half else backbone.feature_itemsize
    computed = _computed(recipe.head, classes, group, rows * cluster.ranks)
    processor = cluster.machine.processor
    memory_mib = recipe.head.memory_mib or processor.default_memory_mib
    blocks = _Blocks.cut(
        group_rows,
        backbone.dim,
        computed,
        plain=classes.plain,
        logit_map=recipe.head.logits,
        memory_bytes=memory_mib << 20,
        half=half,
        row_dtype=ROW_DTYPES[recipe.head.dtype],
        processor=processor,
        updates_rows=recipe.optimizer.head.fused_sgd is not None,
    )
    return HeadShape(
        classes=classes,
        loss=loss,
        calls=calls,
        rows=rows,
        group_rows=group_rows,
        world_rows=group_rows * cluster.data_ranks,
        row_weights=mixed,
        nodes=classes.max_nodes(group),
        dim=backbone.dim,
        per_node=backbone.dim + recipe.head.bias,
        normalizes=recipe.head.logits.normalizes,
        memory_mib=memory_mib,
        computed=computed,
        blocks=blocks.num,
        block_classes=min(blocks.classes, computed),
        graphs=blocks.graphs,
        kept_numbers=blocks.kept_numbers,
        saved=blocks.saved,
        itemsize=itemsize,
        feature_itemsize=backbone.feature_itemsize,
        row_dtype=ROW_DTYPES[recipe.head.dtype],
        fused=recipe.optimizer.head.fused_sgd is not None,
    )


def _computed(head: HeadConfig, classes: Classes, group: int, world_rows: int) -> int:
    """Return how many classes a rank computes logits for: all of its own, or a sample of them."""
    own = classes.max_classes(group)
    if head.loss.over_nodes:
        return classes.max_nodes(group)  # upper bound: only siblings of the batch's paths count
    sampled = head.loss.sampled(classes.num_classes, world_rows)
    return own if sampled is None else min(own, math.ceil(sampled / group))


@dataclass(frozen=True)
class _Blocks:
    num: int
    classes: int
    graphs: bool
    kept_numbers: int
    saved: int

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
        row_dtype: torch.dtype,
        processor: Processor,
        updates_rows: bool,
    ) -> "_Blocks":
        """Divide the classes into blocks by running the engine's own code on fake tensors."""
        compute = torch.bfloat16 if half else torch.float32
        with FakeTensorMode():
            features = torch.empty(rows, dim, dtype=compute)
            held = NodeValues(torch.empty(0, dim, dtype=row_dtype))
            logits = _logits(
                features, _Weights(plain), held, logit_map, memory_bytes, processor, updates_rows
            )
            size = logits.classes_at_once()
            blocks: list[Any] = [
                _Sized(range(start, min(start + size, computed)))
                for start in range(0, computed, size)
            ]
            saved = SavedBlocks(logits, blocks, with_grad=True)
            buffer = saved.buffer(0)
            numbers = 0 if buffer is None else buffer.numel()
        # The last part of the buffer is scratch space for the blocks that are not saved.
        num_saved = len(blocks) if numbers >= rows * computed else numbers // (rows * size) - 1
        return cls(len(blocks), size, saved.graphs, numbers, num_saved)


@dataclass(frozen=True)
class _Weights:
    is_plain: bool


@dataclass(frozen=True)
class _Sized:
    class_ids: range


def _logits(
    features: torch.Tensor,
    weights: Any,
    held: NodeValues,
    logit_map: LogitMap,
    memory_bytes: int,
    processor: Processor,
    updates_rows: bool,
) -> BlockwiseLogits:
    nothing: Any = None
    return BlockwiseLogits(
        weights=weights,
        loss=nothing,
        logit_map=logit_map,
        memory_bytes=memory_bytes,
        processor=processor,
        updates_rows=updates_rows,
        features_Gd=features,
        labels_G=nothing,
        most_rows=len(features),
        rows=held,
        bias=nothing,
        offset=nothing,
        log_prior=nothing,
        margins=nothing,
        choice=None,
        compute_dtype=features.dtype,
        stats_dtype=torch.promote_types(features.dtype, torch.float32),
    )

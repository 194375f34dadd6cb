"""The head of a plan: its shard, the blocks of classes, and the memory and work of one step.

The formulas count how often the engine reads and writes logits and class rows
(`heads/engine/torch_walk.py`). What the loss itself does with logits is recorded on one block.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from heads.build import ROW_DTYPES
from heads.engine.torch_walk import ComputedBlock
from heads.losses import Block, ClassFacts, Loss, Reduction
from heads.rows.node_values import FP8
from heads.tree import LabelTree
from launch.plan.backbone import BackboneCost
from launch.plan.classes import Classes
from launch.plan.cluster import Cluster
from trainer.backbone.trace import Kind, Recorder, Work
from trainer.config import Recipe

FLOAT32 = 4
_INT64 = _FLOAT64 = 8
# Large enough that costs independent of the block size are negligible.
_ROWS, _CLASSES = 256, 2048
_VECTOR_DIM = 300
# With tiles: the time of two products relative to their peak rate, the bytes per logit, and the
# bytes per number of a class row, by the bytes in which it is stored. Fitted to a simulation of the
# L2 caches of H100 and H200.
_TILE_PRODUCTS, _TILE_LOGIT, _TILE_ROW = 4.17, 0.3, {4: 11.9, 2: 6.1, 1: 19.1}
# Passes over float32 rows to normalize them, and to differentiate that.
_NORMALIZING = 26
# Bytes per number to round an updated row or moment on CPUs, or outside of the kernel of fused
# updates: this takes torch operations on 64-bit hashes.
ROUNDING = 110


@dataclass(frozen=True)
class LossCost:
    """The cost of a loss in bytes per logit, in addition to the float32 logit itself.

    width: numbers per row that ranks exchange. shifts: how many of them are logsumexps, or None if
    they cannot be merged by all-reduces. kept: bytes that the graph saves for backward. peak:
    largest number of live bytes in a block. constants: bytes per class that the loss stores.
    statistics, gradient: bytes read and written to compute the statistics, and to compute them with
    a graph and their gradient.
    """

    width: int
    shifts: int | None
    kept: float
    peak: float
    constants: float
    statistics: float
    gradient: float


def measure_loss(loss: Loss) -> LossCost:
    """Run the loss on one block of random logits."""
    generator = torch.Generator().manual_seed(0)
    facts = ClassFacts(
        _CLASSES,
        counts=torch.ones(_CLASSES),
        label_vectors=torch.randn(_CLASSES, _VECTOR_DIM, generator=generator),
        tree=LabelTree.dense(_CLASSES),
    )
    loss = loss.prepare(facts)
    leaf = torch.randn(_ROWS, _CLASSES, generator=generator).requires_grad_()
    classes = torch.arange(_CLASSES)
    labels = torch.randint(_CLASSES, (_ROWS,), generator=generator)
    is_sampled = loss.sampled(_CLASSES, _ROWS) is not None
    weights = torch.ones(_CLASSES, dtype=torch.float64) if is_sampled else None
    view = Block.of(classes, labels, labels, leaf, weights)
    with Recorder() as once, torch.no_grad():
        loss.statistics(leaf, view)
    with Recorder([leaf, classes, labels]) as recorder:
        view = Block.of(classes, labels, labels, leaf, weights)
        with torch.enable_grad():
            computed = ComputedBlock(leaf, view, loss.statistics(leaf, view))
        kept = recorder.live
        grads = tuple(torch.ones_like(stat) for stat in computed.stats)
        gradient = computed.gradient_of_logits(computed.stats, grads)
    del gradient
    per, identity = leaf.numel(), loss.identity(torch.zeros(1))
    shifts = None
    if loss.reductions:
        pairs = zip(loss.reductions, identity, strict=True)
        shifts = sum(s.numel() for reduction, s in pairs if reduction is Reduction.LOGSUMEXP)
    constants = sum(each.numel() * each.itemsize for each in loss.constants().values())
    return LossCost(
        width=sum(stat.numel() for stat in identity),
        shifts=shifts,
        kept=kept / per,
        peak=recorder.peak / per,
        constants=constants / _CLASSES,
        statistics=sum(each.bytes * number for each, number in once.work.items()) / per,
        gradient=sum(each.bytes * number for each, number in recorder.work.items()) / per,
    )


@dataclass(frozen=True)
class Head:
    """The head on the rank with the largest shard."""

    recipe: Recipe
    dim: int
    feature_bytes: int
    classes: Classes
    cluster: Cluster
    loss: LossCost

    @classmethod
    def of(
        cls, recipe: Recipe, backbone: BackboneCost, classes: Classes, cluster: Cluster
    ) -> "Head":
        loss = measure_loss(recipe.head.loss)
        return cls(recipe, backbone.dim, backbone.feature_bytes, classes, cluster, loss)

    # ---- rows: samples, and twice as many if they are mixed

    @property
    def calls(self) -> int:
        """Calls of the head per step."""
        return 1 if self.recipe.calls_head_once else parts_of(self.recipe, self.cluster)

    @property
    def rows(self) -> int:
        """Rows of this rank per call."""
        return -(-share_of(self.recipe, self.cluster) // self.calls) * self._copies

    @property
    def group_rows(self) -> int:
        """Rows of the class group per call."""
        most = self.recipe.train.global_batch * self._copies
        return min(self.rows * self.cluster.class_ranks, most)

    @property
    def _copies(self) -> int:
        return 2 if self.recipe.data.augment.mix is not None else 1

    # ---- the shard

    @property
    def row_dtype(self) -> torch.dtype:
        return ROW_DTYPES[self.recipe.head.dtype]

    @property
    def is_factored(self) -> bool:
        return self.recipe.head.weights.kind == "factored"

    @property
    def is_fused(self) -> bool:
        """Whether rows are updated without a gradient."""
        return self.recipe.optimizer.head.fused_sgd is not None

    @property
    def uses_tiles(self) -> bool:
        head, is_cuda = self.recipe.head, self.cluster.machine.kind == "cuda"
        is_sampled = head.loss.sampled(self.classes.num_classes, self.group_rows) is not None
        return head.tiles and is_cuda and head.loss.tile is not None and not is_sampled

    @property
    def nodes(self) -> int:
        """Number of this rank's weight vectors."""
        return self.classes.max_nodes(self.cluster.class_ranks)

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in products."""
        return 2 if self.recipe.train.precision != "fp32" else self.feature_bytes

    @property
    def moment(self) -> int:
        """Bytes of the vectors and biases in the format of the rows."""
        return self.nodes * (self.dim * self.row_dtype.itemsize + self._bias)

    @property
    def shard(self) -> int:
        """Bytes of the vectors and biases, with the scales of fp8 rows."""
        return self.moment + (2 * self.nodes if self.row_dtype == FP8 else 0)

    @property
    def float32_gradients(self) -> int:
        return self.nodes * (self.dim * FLOAT32 + self._bias)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients until the update. With fused updates, only biases and the inner
        nodes of a tree have gradients."""
        if not self.is_fused:
            return self.moment
        inner = self.nodes * self.classes.inner // self.classes.nodes
        return self.nodes * self._bias + inner * self.dim * FLOAT32

    @property
    def _bias(self) -> int:
        return FLOAT32 if self.recipe.head.bias else 0

    @property
    def class_index(self) -> int:
        """Bytes of the index in `ClassWeights` and of the loss's constants. Every rank stores the
        row of every class, and for its own classes the paths and the order of the sums."""
        classes = self.classes
        own = min(self.nodes, -(-self.nodes * classes.num_classes // classes.nodes))
        size = _INT64 * (classes.num_classes + own)
        size += int(self.loss.constants * classes.num_classes)
        if classes.plain:
            return size
        inner = -(-classes.inner * self.nodes // classes.nodes)
        paths = int(own * classes.depth) * 4 + 4 * _INT64 * own
        return size + paths + _INT64 * (self.nodes + (self.nodes - own) + 4 * inner)

    # ---- the blocks of classes

    @cached_property
    def computed(self) -> int:
        """Number of classes whose logits this rank computes: all of its own, or a sample."""
        loss, group = self.recipe.head.loss, self.cluster.class_ranks
        if loss.over_nodes:
            return self.nodes  # upper bound: only the siblings of the batch's paths count
        own = self.classes.max_classes(group)
        world_rows = self.group_rows * self.cluster.sizes["data"]
        sampled = loss.sampled(self.classes.num_classes, world_rows)
        return own if sampled is None else min(own, math.ceil(sampled / group))

    @property
    def logits(self) -> int:
        """Number of logits that a call computes on this rank."""
        return self.group_rows * self.computed

    @property
    def memory_mib(self) -> int:
        """Memory limit for logits."""
        return self.recipe.head.memory_mib or self.cluster.machine.processor.default_memory_mib

    @cached_property
    def block_classes(self) -> int:
        """Classes per block, as in `BlockwiseLogits.classes_at_once`."""
        normalizes = self.recipe.head.logits.normalizes
        compute, column = self.compute_bytes, self.group_rows * FLOAT32
        converts = self.row_dtype.itemsize not in (compute, FLOAT32)
        if normalizes or not self.classes.plain or converts or self.is_fused:
            column = max(column, self.dim * FLOAT32)
        elif self.cluster.machine.kind == "cuda" and compute != FLOAT32:
            column = max(column, self.dim * compute)
        processor = self.cluster.machine.processor
        return min(processor.classes_at_once(column, self.memory_mib << 20), self.computed)

    @property
    def blocks(self) -> int:
        return -(-self.computed // max(1, self.block_classes))

    @property
    def keeps_graphs(self) -> bool:
        """Whether forward saves the graphs of all blocks (`SavedBlocks`)."""
        return 3 * self.logits * FLOAT32 <= self.memory_mib << 19

    @property
    def saved(self) -> int:
        """Number of logits that forward saves for backward."""
        if self.keeps_graphs:
            return self.logits
        block = self.group_rows * self.block_classes
        return min(self.logits, (self.memory_mib << 18) // FLOAT32 // block * block)

    @property
    def block_bytes(self) -> int:
        """Bytes saved for all blocks, and of the temporaries of one block."""
        block, loss, half = self.group_rows * self.block_classes, self.loss, self.compute_bytes
        is_half = half < FLOAT32
        rows = self.block_classes * self.dim
        work = 2 * self.blocks * self.group_rows * loss.width * FLOAT32
        work += int(block * loss.peak) + block * half * is_half  # the gradient of the logits
        if not self.classes.plain:
            work += rows * FLOAT32
        if self.recipe.head.logits.normalizes:
            # The normalized copy of the rows, its gradient, and two products with the copy.
            work += 4 * rows * FLOAT32
        if is_half:
            work += rows * 2 * half
        if self.keeps_graphs:
            # The temporaries above already include the graph of one block.
            return work + int(self.logits * FLOAT32 + (self.logits - block) * loss.kept)
        rest = min(block, self.logits - self.saved)
        return work + (self.saved + rest) * FLOAT32

    # ---- the work of a step

    def work(self) -> Counter[Work]:
        """Return the work of all calls of a step on this rank."""
        calls = self.calls
        if self.is_factored:
            return self._factored_work(calls)
        one = self._tile_work() if self.uses_tiles else self._torch_work()
        if self.recipe.optimizer.head.fused_sgd == "deferred":
            clips = self.recipe.train.clip_norm is not None
            logits, _, rows = self._products()
            one.update([logits, *[rows] * clips])
        return Counter({each: number * calls for each, number in one.items()})

    def _products(self) -> tuple[Work, Work, Work]:
        """Return the products of a call: logits, gradients of features and gradients of rows. Their
        results are float32."""
        compute, flops = self.compute_bytes, 2 * self.logits * self.dim
        features, rows = self.group_rows * self.dim, self.computed * self.dim
        kind: Kind = "half" if compute < FLOAT32 else "single"
        read = compute * (features + rows + self.logits)
        return (
            Work(kind, flops, read + (FLOAT32 - compute) * self.logits),
            Work(kind, flops, read + (FLOAT32 - compute) * features),
            Work(kind, flops, read + (FLOAT32 - compute) * rows),
        )

    def _tile_work(self) -> Counter[Work]:
        numbers, (product, *_) = self.computed * self.dim, self._products()
        moved = _TILE_LOGIT * self.logits + _TILE_ROW[self.row_dtype.itemsize] * numbers
        moved += self._normalizing * numbers + self._update_bytes
        products = product._replace(flops=int(_TILE_PRODUCTS * product.flops), bytes=0)
        return Counter([products, Work("other", 0, int(moved))])

    def _torch_work(self) -> Counter[Work]:
        loss, again = self.loss, 1 - self.saved / max(1, self.logits)
        products, compute = self._products(), self.compute_bytes
        # The gradient of the logits is cast. Backward computes the statistics again, except if
        # forward saved the graphs.
        per_logit = loss.gradient + (FLOAT32 + compute) * (compute < FLOAT32)
        per_logit += loss.statistics * (not self.keeps_graphs)
        # Rows are cast, or summed along their paths, for the logits, the gradients of the features,
        # and the logits that are not saved.
        reads, row = 2 + again, self.row_dtype.itemsize
        per_number = reads * (row + compute) * (row != compute) + self._normalizing
        if not self.classes.plain:
            per_number += reads * (self.classes.depth + 1) * FLOAT32 + 4 * FLOAT32
        moved = per_logit * self.logits + per_number * self.computed * self.dim
        repeated = products[0]._replace(
            flops=int(again * products[0].flops), bytes=int(again * products[0].bytes)
        )
        return Counter([*products, repeated, Work("other", 0, int(moved + self._update_bytes))])

    @property
    def _normalizing(self) -> int:
        return _NORMALIZING * FLOAT32 if self.recipe.head.logits.normalizes else 0

    @property
    def _update_bytes(self) -> int:
        """Bytes of the update in the backward pass, which reads the gradient and the row and writes
        the row; otherwise, those of the sum over micro-batches."""
        numbers, row = self.computed * self.dim, self.row_dtype.itemsize
        if not self.is_fused:
            return 3 * FLOAT32 * numbers * (self.calls > 1)
        rounds = self.row_dtype != torch.float32 and self.cluster.machine.kind == "cpu"
        return numbers * (FLOAT32 + 2 * row + ROUNDING * rounds)

    def _factored_work(self, calls: int) -> Counter[Work]:
        """Return six products of features or d x d sums in float64, and the update of d x d."""
        rows = self.group_rows * self.cluster.sizes["data"]
        product = Work("single", 2 * rows * self.dim**2, (rows + self.dim) * self.dim * _FLOAT64)
        return Counter({product: 6 * calls})


def share_of(recipe: Recipe, cluster: Cluster) -> int:
    """Return the samples of the rank with the most samples."""
    return -(-recipe.train.global_batch // cluster.ranks)


def parts_of(recipe: Recipe, cluster: Cluster) -> int:
    """Return the number of micro-batches of a step."""
    return min(recipe.train.micro_batches, share_of(recipe, cluster))

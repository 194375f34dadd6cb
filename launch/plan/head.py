"""The head of a plan: its shard, the blocks of classes, and the memory and work of one step.

The formulas count how often the engine reads and writes logits and class rows
(`heads/engine/torch_walk.py`). What the loss itself does with logits is recorded on one block.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open

from data.shards.hierarchy import ClassPath, ClassPaths
from heads.build import ROW_DTYPES
from heads.engine.block_size import bytes_of_class, saved_blocks
from heads.engine.torch_walk import ComputedBlock
from heads.losses import Block, ClassFacts, Loss
from heads.tree import LabelTree
from launch.plan.cluster import Cluster
from trainer.backbone.trace import BackboneCost, Kind, Recorder, Work
from trainer.config import Recipe

INT32 = FLOAT32 = 4
INT64 = FLOAT64 = 8
_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Large enough that costs independent of the block size are negligible.
_ROWS, _CLASSES, _VECTOR_DIM = 256, 2048, 300
# With tiles: the time of two products relative to their peak rate, the bytes per logit, and the
# bytes per number of a class row, by the bytes in which it is stored. Fitted to a simulation of the
# L2 caches of H100 and H200.
_TILE_PRODUCTS, _TILE_LOGIT, _TILE_ROW = 4.17, 0.3, {4: 11.9, 2: 6.1, 1: 19.1}
# Passes over float32 rows to normalize them and to differentiate that.
_NORMALIZING = 26
# Bytes per number to round an updated row or moment without the kernel of fused updates: this takes
# torch operations on 64-bit hashes.
ROUNDING = 110


@dataclass(frozen=True)
class Classes:
    """The nodes of the label tree, which is not built.

    nodes: nodes to shard; inner: nodes with children; depth: mean number of nodes on the path of a
    class; boundary: nodes that ranks other than their owners need. is_bound: these are upper
    bounds.
    """

    num_classes: int
    nodes: int
    depth: float = 1.0
    boundary: int = 0
    inner: int = 0
    is_bound: bool = False

    @classmethod
    def of(
        cls, recipe: Recipe, num: int, *, class_ranks: int, paths: ClassPaths | None = None
    ) -> "Classes":
        """Return the nodes of a V-tree from the hierarchy `paths` of the classes, or from the size
        of its file, whose inner nodes are assumed to be a balanced binary tree. Otherwise, return
        the bounds of a U-tree with one node per class, or of a V-tree in which all inner nodes have
        two children."""
        weights, loss = recipe.head.weights, recipe.head.loss
        if weights.kind == "dense" or weights.kind == "factored":
            return cls(num, num)
        inner, depth, is_bound = num - 1, 0.0, True
        if weights.kind == "vtree" and paths is not None:
            inner, depth, is_bound = *_inner_and_depth(paths), False
        elif weights.kind == "vtree" and (path := weights.tree.file) is not None and path.is_file():
            with safe_open(path, framework="numpy") as file:
                inner, is_bound = file.get_slice("parent").get_shape()[0] - num, False
        nodes = num + inner * (weights.kind == "vtree")
        if loss.over_nodes:  # each node is a column of the logits
            return cls(num, nodes, is_bound=is_bound)
        levels = max(1, inner.bit_length())
        boundary = min(nodes, (class_ranks - 1) * levels)
        return cls(num, nodes, depth or levels + 1.0, boundary, inner, is_bound)


def _inner_and_depth(paths: ClassPaths) -> tuple[int, float]:
    """Return the number of inner nodes of `label_tree_of_paths`, which omits nodes with a single
    child, and the mean number of nodes on the path of a class."""
    counts = np.bincount(paths.of_class, minlength=len(paths.distinct)).tolist()
    children: Counter[ClassPath] = Counter()
    for path, count in zip(paths.distinct, counts, strict=True):
        children[path] += count
    for node in {path[:end] for path in paths.distinct for end in range(1, len(path) + 1)}:
        children[node[:-1]] += 1
    inner = {node for node, count in children.items() if node and count != 1}
    depth = sum(
        count * sum(path[:end] in inner for end in range(1, len(path) + 1))
        for path, count in zip(paths.distinct, counts, strict=True)
    )
    return len(inner), 1 + depth / len(paths.of_class)


@dataclass(frozen=True)
class LossCost:
    """The cost of a loss in bytes per logit, in addition to the float32 logit itself.

    width: numbers per row that ranks exchange. kept: bytes that the graph saves for backward. peak:
    largest number of live bytes. constants: bytes per class that the loss stores. statistics,
    gradient: bytes read and written to compute the statistics, and to compute them with a graph and
    their gradient.
    """

    width: int
    kept: float
    peak: float
    constants: float
    statistics: float
    gradient: float

    @classmethod
    def of(cls, loss: Loss) -> "LossCost":
        """Run the loss on one block of random logits."""
        vectors, tree = torch.randn(_CLASSES, _VECTOR_DIM), LabelTree.dense(_CLASSES)
        loss = loss.prepare(ClassFacts(_CLASSES, torch.ones(_CLASSES), vectors, tree))
        leaf = torch.randn(_ROWS, _CLASSES).requires_grad_()
        classes, labels = torch.arange(_CLASSES), torch.randint(_CLASSES, (_ROWS,))
        is_sampled = loss.sampled(_CLASSES, _ROWS) is not None
        weights = torch.ones(_CLASSES, dtype=torch.float64) if is_sampled else None
        with Recorder() as once, torch.no_grad():
            loss.statistics(leaf, Block.of(classes, labels, labels, leaf, weights))
        with Recorder([leaf, classes, labels]) as recorder:
            view = Block.of(classes, labels, labels, leaf, weights)
            computed = ComputedBlock(leaf, view, loss.statistics(leaf, view))
            kept = recorder.live
            grads = tuple(torch.ones_like(stat) for stat in computed.stats)
            gradient = computed.gradient_of_logits(computed.stats, grads)
        del gradient
        per, identity = leaf.numel(), loss.identity(torch.zeros(1))
        return cls(
            width=sum(stat.numel() for stat in identity),
            kept=kept / per,
            peak=recorder.peak / per,
            constants=sum(each.nbytes for each in loss.constants().values()) / _CLASSES,
            statistics=once.bytes / per,
            gradient=recorder.bytes / per,
        )


class Head:
    """The head on the rank with the largest shard.

    parts: micro-batches of a step. passes: forward passes of the backbone in a step; if the head
    needs all features first, each micro-batch runs forward twice. calls: calls of the head per
    step, with `rows` rows of this rank and `group_rows` of the class group. nodes: this rank's
    weight vectors, with `dim` numbers of `row_bytes` each. fused: they are updated without a
    gradient. computed: classes whose `logits` this rank computes, in `blocks` of `block_classes`.
    graphs: forward saves the graphs of all blocks; otherwise, it saves `saved` logits.
    compute_bytes: bytes per number in products.
    """

    def __init__(
        self, recipe: Recipe, backbone: BackboneCost, classes: Classes, cluster: Cluster
    ) -> None:
        config, train, group = recipe.head, recipe.train, cluster.class_ranks
        self.recipe, self.backbone = recipe, backbone
        self.classes, self.cluster = classes, cluster
        self.loss = LossCost.of(config.loss)
        self.is_factored = config.weights.kind == "factored"
        self.fused = recipe.optimizer.head.fused_sgd is not None
        held, compute = ROW_DTYPES[config.dtype], _COMPUTE[train.precision]
        self.dim, self.row_bytes, self.compute_bytes = backbone.dim, held.itemsize, compute.itemsize
        # Rows: each sample is one, or two if samples are mixed.
        share = -(-train.global_batch // cluster.ranks)
        copies = 1 + (recipe.data.augment.mix is not None)
        self.parts = min(train.micro_batches, share)
        self.calls = 1 if recipe.calls_head_once else self.parts
        self.passes = self.parts * (2 if recipe.calls_head_once and self.parts > 1 else 1)
        self.rows = -(-share // self.calls) * copies
        self.group_rows = min(self.rows * group, train.global_batch * copies)
        # Classes: all of the rank, or a sample. Over nodes, this is an upper bound.
        self.nodes = -(-classes.nodes // group)
        self.own = min(self.nodes, -(-self.nodes * classes.num_classes // classes.nodes))
        self.computed = self.nodes if config.loss.over_nodes else self.own
        sampled = config.loss.sampled(classes.num_classes, self.group_rows * cluster.size("data"))
        if sampled is not None:
            self.computed = min(self.computed, math.ceil(sampled / group))
        is_cuda, processor = cluster.machine.kind == "cuda", cluster.machine.processor
        has_tile = config.loss.tile is not None and sampled is None
        self.uses_tiles = config.tiles and is_cuda and has_tile
        # Blocks
        memory = (config.memory_mib or processor.default_memory_mib) << 20
        per_class = bytes_of_class(
            rows=self.group_rows,
            dim=self.dim,
            held=held,
            compute=compute,
            stats=torch.float32,
            copies=config.logits.normalizes or classes.inner > 0 or self.fused,
            is_cuda=is_cuda,
        )
        self.block_classes = min(processor.classes_at_once(per_class, memory), self.computed)
        starts = range(0, self.computed, max(1, self.block_classes))
        ends = (min(start + self.block_classes, self.computed) for start in starts)
        sizes = [self.group_rows * (end - start) for start, end in zip(starts, ends, strict=True)]
        self.graphs, num_saved = saved_blocks(sizes, FLOAT32, memory)
        self.blocks, self.logits, self.saved = len(sizes), sum(sizes), sum(sizes[:num_saved])

    def bytes_of_rows(self, itemsize: int) -> int:
        """Return the bytes of the vectors, with `itemsize` bytes per number, and of their bias."""
        return self.nodes * (self.dim * itemsize + FLOAT32 * self.recipe.head.bias)

    @property
    def shard(self) -> int:
        """Bytes of the vectors and biases, with the scales of fp8 rows."""
        return self.bytes_of_rows(self.row_bytes) + 2 * self.nodes * (self.row_bytes == 1)

    @property
    def moment(self) -> int:
        """Bytes of a moment of the optimizer, of which fused updates and factored heads have none;
        the gradients until the update have the same size."""
        return 0 if self.fused or self.is_factored else self.bytes_of_rows(self.row_bytes)

    @property
    def class_index(self) -> int:
        """Bytes of the index in `ClassWeights` and of the loss's constants. With a tree, every rank
        stores the position of every class, and for its own classes the paths and the order of the
        sums."""
        classes, own = self.classes, self.own
        size = INT64 * own + INT32 * classes.num_classes * (classes.inner > 0)
        size += int(self.loss.constants * classes.num_classes)
        if classes.inner:
            inner = -(-classes.inner * self.nodes // classes.nodes)
            size += int(own * classes.depth) * 4 + INT64 * (3 * own + 2 * self.nodes + 4 * inner)
        return size

    @property
    def block_bytes(self) -> int:
        """Bytes saved for all blocks, and of the temporaries of one block."""
        block, half = self.group_rows * self.block_classes, self.compute_bytes < FLOAT32
        # Per number of a block of rows: the sums along paths; the normalized rows, their gradient
        # and two products with them; two copies in the precision of the products.
        copies = FLOAT32 * (self.classes.inner > 0)
        copies += 4 * FLOAT32 * self.recipe.head.logits.normalizes
        copies += 2 * self.compute_bytes * half
        work = 2 * self.blocks * self.group_rows * self.loss.width * FLOAT32
        work += int(block * self.loss.peak) + block * self.compute_bytes * half
        work += copies * self.block_classes * self.dim
        if self.graphs:  # `peak` already includes the graph of one block
            return work + int(self.logits * FLOAT32 + (self.logits - block) * self.loss.kept)
        return work + (self.saved + min(block, self.logits - self.saved)) * FLOAT32

    def work(self) -> Counter[Work]:
        """Return the work of all calls of a step on this rank."""
        if self.is_factored:  # six products of features or d x d sums in float64
            rows = self.group_rows * self.cluster.size("data")
            product = Work("single", 2 * rows * self.dim**2, (rows + self.dim) * self.dim * FLOAT64)
            return Counter({product: 6 * self.calls})
        compute, flops = self.compute_bytes, 2 * self.logits * self.dim
        features, rows = self.group_rows * self.dim, self.computed * self.dim
        kind: Kind = "half" if compute < FLOAT32 else "single"
        # The products give logits, gradients of features, and gradients of rows, in float32.
        read = compute * (features + rows + self.logits)
        products = [
            Work(kind, flops, read + (FLOAT32 - compute) * written)
            for written in (self.logits, features, rows)
        ]
        moved = float(self._update_bytes * rows)
        moved += _NORMALIZING * FLOAT32 * self.recipe.head.logits.normalizes * rows
        if self.uses_tiles:
            moved += _TILE_LOGIT * self.logits + _TILE_ROW[self.row_bytes] * rows
            work = [Work(kind, int(_TILE_PRODUCTS * flops), 0)]
        else:
            again = 1 - self.saved / max(1, self.logits)
            moved += self._torch_bytes(again, rows)
            logits = products[0]
            work = [*products, Work(kind, int(again * flops), int(again * logits.bytes))]
        if self.recipe.optimizer.head.fused_sgd == "deferred":
            clips = self.recipe.train.clip_norm is not None
            work += [products[0], *products[2:] * clips]
        one = Counter([*work, Work("other", 0, int(moved))])
        return Counter({each: number * self.calls for each, number in one.items()})

    def _torch_bytes(self, again: float, rows: int) -> float:
        """Return the bytes of torch operations on logits and rows, besides products. `again` is the
        share of logits that backward computes again."""
        compute, row = self.compute_bytes, self.row_bytes
        # The gradient of the logits is cast. Backward computes the statistics again, except if
        # forward saved the graphs.
        per_logit = self.loss.gradient + (FLOAT32 + compute) * (compute < FLOAT32)
        per_logit += self.loss.statistics * (not self.graphs)
        # Rows are cast, or summed along their paths, for the logits, the gradients of the features,
        # and the logits that are not saved.
        per_number = (2 + again) * (row + compute) * (row != compute)
        if self.classes.inner:
            per_number += FLOAT32 * ((2 + again) * (self.classes.depth + 1) + 4)
        return per_logit * self.logits + per_number * rows

    @property
    def _update_bytes(self) -> int:
        """Bytes per number of the update in the backward pass, which reads the gradient and the row
        and writes the row; otherwise, of the sum over micro-batches or of the rounding."""
        if not self.fused:
            rounding = (FLOAT32 + self.row_bytes) * (self.row_bytes < FLOAT32)
            return 3 * FLOAT32 * (self.calls > 1) + rounding
        rounds = self.row_bytes < FLOAT32 and self.cluster.machine.kind == "cpu"
        return FLOAT32 + 2 * self.row_bytes + ROUNDING * rounds

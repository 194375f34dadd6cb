"""The memory of a rank by item and phase: device memory during a step, main memory during a run,
and the size of a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan.head import FLOAT32, FLOAT64, INT32, INT64, Head

# The CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers. Assumed, not measured.
_CUDA_RESERVE = 2 << 30
# Measured resident memory of Python, torch, transformers and the trainer, and on CPUs, in addition,
# of the kernels that oneDNN compiles.
_PROCESS_BYTES, _KERNEL_BYTES = 490 << 20, 100 << 20
# The share of activations by which fragmentation enlarges the heap, measured with glibc.
_FRAGMENTATION = 0.3
# Bytes per node of a label tree while the head is built, and afterwards. Measured with 200,000 to
# 2,000,000 classes.
_TREE_BYTES, _KEPT_TREE_BYTES, _DENSE_TREE_BYTES = 112, 21, 4
# Each rank hashes what it writes and what it verifies. Measured SHA-256 of a file in memory.
_HASHED_PER_SECOND = 1.4e9

_NEEDED_TO_EVALUATE = ("backbone weights", "head weights", "optimizer moments", "class index")

Lines = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of a rank by item, one number per phase. `ranks` ranks share `capacity` bytes (None:
    unknown)."""

    phases: tuple[str, ...]
    lines: Lines
    capacity: int | None
    ranks: int = 1

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of one rank in each phase."""
        sums = map(sum, zip(*self.lines.values(), strict=True))
        return dict(zip(self.phases, sums, strict=True))

    @property
    def peak_phase(self) -> str:
        """The phase in which a rank needs the most memory."""
        return max(self.phases, key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        """Peak bytes of all ranks together."""
        return self.ranks * max(self.totals.values())

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.peak <= self.capacity


@dataclass(frozen=True)
class BackboneShare:
    """The bytes of the backbone on a rank, derived from `Sharding`.

    updated: the weights that the rank's optimizer updates. buckets persist between steps; gathered
    and copied weights and gradients exist only in the backward pass.
    """

    weights: int
    gradients: int
    updated: int
    buckets: int
    gathered: int

    @classmethod
    def of(cls, head: Head) -> "BackboneShare":
        backbone, cluster = head.backbone, head.cluster
        whole = backbone.numel * FLOAT32
        if cluster.ranks == 1:
            return cls(whole, whole, whole, 0, 0)
        sharding, ranks = head.recipe.train.strategy.sharding, cluster.size("shard")
        units = backbone.padded(ranks if sharding.weights else 1)
        piece = -(-sum(units) // ranks) * FLOAT32
        bucket = min(sharding.bucket * FLOAT32, whole)
        gathered = 0 if sharding.keeps_bucket else bucket
        if sharding.gathers_blocks:
            # The weights outside the blocks, a block and the next one.
            *blocks, root = units
            gathered += sharding.param_bytes * (root + sum(sorted(blocks)[-2:]))
        elif sharding.weights:
            gathered += sharding.param_bytes * sum(units)
        if sharding.weights and not bucket:  # gradients of a block, and their copy
            gathered += (sharding.param_bytes + sharding.reduce_bytes) * max(units)
        updated = piece if sharding.updates else whole
        weights = (piece if sharding.weights else whole) + sharding.copies_updates * updated
        gradients = piece if sharding.gradients else whole
        return cls(weights, gradients, updated, bucket * sharding.keeps_bucket, gathered)


def device_memory(head: Head, share: BackboneShare) -> MemoryTable:
    """Return the memory of the rank that needs the most during a step. The phase `head` is the
    backward pass of the head."""
    recipe, backbone, parts = head.recipe, head.backbone, head.parts
    machine = head.cluster.machine
    during_head = parts == 1 or not recipe.calls_head_once  # otherwise they are computed later
    averages = share.updated + backbone.buffers + head.bytes_of_rows(FLOAT32)
    always = {
        "backbone weights": share.weights,
        "head weights": head.shard,
        "optimizer moments": recipe.optimizer.num_moments * (share.updated + head.moment),
        "moving averages": averages * (recipe.train.ema is not None),
        "inputs and buffers": backbone.inputs * parts + backbone.buffers,
        "class index": head.class_index,
        "strategy's buckets": share.buckets,
        "CUDA and NCCL (assumed)": _CUDA_RESERVE * (machine.kind == "cuda"),
    }
    lines = {
        **{what: (size, size, size) for what, size in always.items()},
        "backbone gradients": (share.gradients * (parts > 1), share.gradients, share.gradients),
        "gathered blocks": (0, share.gathered, 0),
        "activations": (backbone.activations * during_head, max(0, backbone.backward), 0),
        **_of_head(head),
    }
    return MemoryTable(("head", "backward", "optimizer"), lines, machine.memory)


def _of_head(head: Head) -> Lines:
    if head.is_factored:  # d x d matrices, and two copies of the features of all ranks, in float64
        square = 6 * head.dim**2 * FLOAT64
        world_rows = head.group_rows * head.cluster.size("data")
        rows = world_rows * head.dim * (head.backbone.feature_bytes + 2 * FLOAT64)
        return {"factored head's sums and rows": (square + rows, square, square + rows)}
    kept = first = head.moment
    if head.fused:  # only biases and the inner nodes of a tree have gradients
        inner = head.nodes * head.classes.inner // head.classes.nodes
        kept = first = head.bytes_of_rows(0) + inner * head.dim * FLOAT32
    else:  # gradients of bf16 rows are float32 sums, which are then rounded
        first *= 2 if head.calls > 1 else 1
        first += head.bytes_of_rows(FLOAT32) * (head.row_bytes < FLOAT32)
    features = head.group_rows * head.dim * (head.compute_bytes + FLOAT32)
    features += head.rows * head.dim * head.backbone.feature_bytes
    return {
        "head gradients": (first, kept, kept),
        "features and their gradients": (features, 0, 0),
        "head blocks": (head.block_bytes, 0, 0),
    }


def host_memory(head: Head, device: MemoryTable, others: Lines) -> MemoryTable:
    """Return the main memory of a rank while it builds the head, trains and evaluates. On CPUs, the
    training step also uses main memory; the size of that of GPU machines is unknown.

    The class list is not counted: its file is mapped, and all processes of a machine share it.
    Loader processes are not counted either.
    """
    num, nodes = head.classes.num_classes, head.classes.nodes
    is_cpu = head.cluster.machine.kind == "cpu"
    # The C library does not return the memory of freed activations, and gradients, which are
    # larger, do not fit into the gaps.
    activations, gradients = (device.lines[what] for what in ("activations", "backbone gradients"))
    heap = int(
        device.totals["head"] + gradients[1] - gradients[0] + _FRAGMENTATION * activations[0]
    )
    kernels = max(0, heap - device.peak) + _KERNEL_BYTES
    build = kept = _DENSE_TREE_BYTES
    if head.classes.inner or head.recipe.head.loss.over_nodes:
        build, kept = _TREE_BYTES, _KEPT_TREE_BYTES
    # The row of each class among the thresholds, and how many samples reach them: the counts of the
    # rank's own classes, and on the main rank those of all classes.
    counts = 2 * INT32 * len(head.recipe.evaluation.recalls)
    results = INT32 * num + counts * (head.own + num)
    weights = sum(device.lines[what][0] for what in _NEEDED_TO_EVALUATE)
    lines = {
        "Python and libraries": (_PROCESS_BYTES,) * 3,
        "samples per class": (2 * INT64 * num, INT64 * num, INT64 * num),
        "label tree": (build * nodes, kept * nodes, kept * nodes),
        "first rows": (head.shard * is_cpu, 0, 0),  # on GPUs, they are generated on the device
        **others,
        "memory of a step (CPU)": (0, device.peak * is_cpu, 0),
        "model (CPU)": (0, 0, weights * is_cpu),
        "results of all classes": (0, 0, results),
        "kernels and fragmented heap": (0, kernels * is_cpu, _KERNEL_BYTES * is_cpu),
    }
    phases = ("building the head", "training", "evaluating")
    gpus = head.cluster.gpus
    capacity = head.cluster.machine.memory * gpus if is_cpu else None
    return MemoryTable(phases, lines, capacity, gpus)


@dataclass(frozen=True)
class CheckpointCost:
    """A checkpoint of all ranks. size: its bytes. of_rank: the bytes that a rank writes, which is
    also the size of its copy in main memory. save, resume: seconds."""

    size: int
    of_rank: int
    save: float
    resume: float

    @classmethod
    def of(cls, head: Head, storage: float) -> "CheckpointCost":
        """Return the cost with `storage` bytes per second between a machine and its storage.

        Each shard of the head exists once per class group, and the groups divide its tensors among
        themselves. A rank hashes what it writes. On resume, it hashes a share of the files, and
        then reads what it needs.
        """
        recipe, backbone, cluster = head.recipe, head.backbone, head.cluster
        copies, moments = 1 + (recipe.train.ema is not None), recipe.optimizer.num_moments
        shard = copies * head.shard + moments * head.moment
        whole = (copies + moments) * backbone.numel * FLOAT32 + copies * backbone.buffers
        tensors = copies + moments * (head.moment > 0)
        of_rank = -(-tensors // cluster.size("data")) * head.shard + -(-whole // cluster.ranks)
        size = shard * cluster.class_ranks + whole
        of_machine = size / cluster.nodes
        read = min(cluster.gpus, cluster.class_ranks) * shard + whole
        hashing = of_machine / cluster.gpus / _HASHED_PER_SECOND
        save, resume = of_machine / storage, (of_machine + read) / storage
        return cls(size, of_rank, save + hashing, resume + hashing)

    def interval(self, *, failures_per_second: float) -> float:
        """Return the seconds between checkpoints for which saving and repeated steps cost the least
        (Young 1974, Daly 2006)."""
        return math.sqrt(2 * self.save / failures_per_second)

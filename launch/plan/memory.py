"""The memory of a rank by item and phase: device memory during a step, main memory during a run,
and the size of a checkpoint."""

import math
from dataclasses import dataclass

from launch.plan.cluster import Cluster
from launch.plan.head import FLOAT32, FLOAT64, INT64, Head
from trainer.backbone.trace import BackboneCost
from trainer.config import Recipe

# The CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers. Assumed, not measured.
_CUDA_RESERVE = 2 << 30
# Measured resident memory of Python, torch, transformers and the trainer, and on CPUs, in addition,
# of the kernels that oneDNN compiles.
_PROCESS_BYTES, _KERNEL_BYTES = 490 << 20, 100 << 20
# The share of activations by which fragmentation enlarges the heap, measured with glibc.
_FRAGMENTATION = 0.3
# Bytes per node of the label tree while the head is built and afterwards. Measured with 300,000 and
# 2,000,000 classes.
_TREE_BYTES, _KEPT_TREE_BYTES = 64, 57
# Each rank hashes what it writes and what it verifies. Measured SHA-256 of a file in memory.
_HASHED_PER_SECOND = 1.4e9


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of a rank by item, one number per phase. `ranks` ranks share `capacity` bytes (None:
    unknown)."""

    phases: tuple[str, ...]
    lines: dict[str, tuple[int, ...]]
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
    def of(cls, recipe: Recipe, backbone: BackboneCost, cluster: Cluster) -> "BackboneShare":
        whole = backbone.numel * FLOAT32
        if cluster.ranks == 1:
            return cls(whole, whole, whole, 0, 0)
        sharding, ranks = recipe.train.strategy.sharding, cluster.size("shard")
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
        return cls(
            weights=(piece if sharding.weights else whole) + sharding.copies_updates * updated,
            gradients=piece if sharding.gradients else whole,
            updated=updated,
            buckets=bucket if sharding.keeps_bucket else 0,
            gathered=gathered,
        )


def device_memory(
    recipe: Recipe, backbone: BackboneCost, share: BackboneShare, head: Head
) -> MemoryTable:
    """Return the memory of the rank that needs the most during a step. The phase `head` is the
    backward pass of the head."""
    parts, machine = head.parts, head.cluster.machine
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
    # Fused updates and fp8 or bf16 rows need no tensor of the size of the shard.
    shard = head.shard if head.row_bytes == FLOAT32 and not head.fused else 0
    updating = shard  # the squared gradients of the head, for their norm
    if recipe.optimizer.copies_tensors:
        largest = max(shape.numel() for unit in backbone.units for shape in unit) * FLOAT32
        updating = max(share.updated, shard) + 2 * max(largest, shard)
    table = {
        **{what: (size, size, size) for what, size in always.items()},
        "backbone gradients": (share.gradients * (parts > 1), share.gradients, share.gradients),
        "gathered blocks": (0, share.gathered, 0),
        "activations": (backbone.activations * during_head, max(0, backbone.backward), 0),
        **_of_head(head),
        "optimizer's temporaries": (0, 0, updating),
    }
    lines = {what: sizes for what, sizes in table.items() if any(sizes)}
    return MemoryTable(("head", "backward", "optimizer"), lines, machine.memory)


def _of_head(head: Head) -> dict[str, tuple[int, ...]]:
    if head.is_factored:  # d x d matrices, and two copies of the features of all ranks, in float64
        square = 6 * head.dim**2 * FLOAT64
        world_rows = head.group_rows * head.cluster.size("data")
        rows = world_rows * head.dim * (head.feature_bytes + 2 * FLOAT64)
        return {"factored head's sums and rows": (square + rows, square, square + rows)}
    kept = first = head.moment
    if head.fused:  # only biases and the inner nodes of a tree have gradients
        inner = head.nodes * head.classes.inner // head.classes.nodes
        kept = first = head.bytes_of_rows(0) + inner * head.dim * FLOAT32
    else:  # gradients of bf16 rows are float32 sums, which are then rounded
        first *= 2 if head.calls > 1 else 1
        first += head.bytes_of_rows(FLOAT32) * (head.row_bytes < FLOAT32)
    rows = head.group_rows * head.dim
    features = rows * (head.compute_bytes + FLOAT32) + head.rows * head.dim * head.feature_bytes
    return {
        "head gradients": (first, kept, kept),
        "features and their gradients": (features, 0, 0),
        "head blocks": (head.block_bytes, 0, 0),
    }


def host_memory(
    head: Head,
    device: MemoryTable,
    of_data: dict[str, tuple[int, ...]],
    *,
    class_bytes: tuple[float, float],
    capacity: int | None,
) -> MemoryTable:
    """Return the main memory of a rank while it parses the manifest, builds the head and trains. On
    CPUs, the training step also uses main memory.

    Every rank parses the manifest and stores the class list as Python objects: `class_bytes` per
    class while it parses and afterwards. Loader processes are not counted, because they are forked
    and share the list copy-on-write.
    """
    num, nodes = head.classes.num_classes, head.classes.nodes
    is_cpu, (parsing, kept) = head.cluster.machine.kind == "cpu", class_bytes
    # The C library does not return the memory of freed activations, and gradients, which are
    # larger, do not fit into the gaps.
    activations, gradients = (device.lines[what] for what in ("activations", "backbone gradients"))
    heap = (
        device.totals["head"] + gradients[1] - gradients[0] + int(_FRAGMENTATION * activations[0])
    )
    table = {
        "Python and libraries": (_PROCESS_BYTES, _PROCESS_BYTES, _PROCESS_BYTES),
        # While the head is built: also the class names and each class's number of samples.
        "class list": (int(parsing * num), int(kept * num) + 2 * INT64 * num, int(kept * num)),
        "label tree": (0, _TREE_BYTES * nodes, _KEPT_TREE_BYTES * nodes),
        "first rows": (0, head.shard * is_cpu, 0),  # on GPUs, they are generated on the device
        **of_data,
        "memory of a step (CPU)": (0, 0, device.peak * is_cpu),
        "kernels and fragmented heap": (
            0,
            0,
            (max(0, heap - device.peak) + _KERNEL_BYTES) * is_cpu,
        ),
    }
    lines = {what: sizes for what, sizes in table.items() if any(sizes)}
    return MemoryTable(("manifest", "head", "training"), lines, capacity, head.cluster.gpus)


@dataclass(frozen=True)
class CheckpointCost:
    """A checkpoint of all ranks. size: its bytes. of_rank: the bytes that a rank writes, which is
    also the size of its copy in main memory. save, resume: seconds."""

    size: int
    of_rank: int
    save: float
    resume: float

    @classmethod
    def of(
        cls, recipe: Recipe, backbone: BackboneCost, head: Head, storage: float
    ) -> "CheckpointCost":
        """Return the cost with `storage` bytes per second between a machine and its storage.

        Each shard of the head exists once per class group, and the groups divide its tensors among
        themselves. A rank hashes what it writes. On resume, it hashes a share of the files, and
        then reads what it needs.
        """
        cluster, copies = head.cluster, 1 + (recipe.train.ema is not None)
        moments = recipe.optimizer.num_moments
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

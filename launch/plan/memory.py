"""The memory of a rank by item and phase: device memory during a step, main memory during a run,
and the size of a checkpoint."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data.shards.manifest import ClassInfo
from launch.plan.backbone import BackboneCost
from launch.plan.cluster import Cluster
from launch.plan.head import FLOAT32, Head, parts_of
from trainer.config import Recipe

DEVICE_PHASES = ("head", "backward", "optimizer")
HOST_PHASES = ("manifest", "head", "training")
_INT64 = _FLOAT64 = 8
# The CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers. Assumed, not measured.
_CUDA_RESERVE = 2 << 30
# Measured resident memory of Python, torch, transformers and the trainer on a CPU.
_PROCESS_BYTES = 450 << 20
# Bytes per node of the label tree while the head is built and afterwards. Measured with 300,000 and
# 2,000,000 classes.
_TREE_BYTES, _KEPT_TREE_BYTES = 64, 57
_SAMPLED = 1000
# Each rank hashes what it writes and what it verifies. Measured SHA-256 of a file in memory.
_HASHED_PER_SECOND = 1.4e9


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of a rank by item, one number per phase.

    ranks: how many of them share `capacity`, in bytes (None: unknown).
    """

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
        sharding = recipe.train.strategy.sharding
        ranks = cluster.sizes["shard"]
        units = backbone.padded(ranks if sharding.weights else 1)
        piece = -(-sum(units) // ranks) * FLOAT32
        bucket = min(sharding.bucket * FLOAT32, whole)
        gathered = 0 if sharding.keeps_bucket else bucket
        if sharding.gathers_blocks:
            # The weights outside the blocks, a block and the next one. The gradients of a block,
            # and their copy for the reduction.
            *blocks, root = units
            gathered += sharding.param_bytes * (root + sum(sorted(blocks)[-2:]))
        elif sharding.weights:
            gathered += sharding.param_bytes * sum(units)
        if sharding.weights and not bucket:
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
    recipe: Recipe, backbone: BackboneCost, share: BackboneShare, head: Head, cluster: Cluster
) -> MemoryTable:
    """Return the memory of the rank that needs the most during a step. `head` is the backward pass
    of the head."""
    parts, moments = parts_of(recipe, cluster), recipe.optimizer.num_moments
    during_head = parts == 1 or not recipe.calls_head_once  # otherwise they are computed later
    of_head = 0 if head.is_factored or head.is_fused else head.moment
    averages = share.updated + backbone.buffers + head.float32_gradients
    table: dict[str, tuple[int, ...]] = {
        "backbone weights": (share.weights,) * 3,
        "head weights": (head.shard,) * 3,
        "optimizer moments": (moments * (share.updated + of_head),) * 3,
        "moving averages": (averages * (recipe.train.ema is not None),) * 3,
        "inputs and buffers": (backbone.inputs * parts + backbone.buffers,) * 3,
        "class index": (head.class_index,) * 3,
        "strategy's buckets": (share.buckets,) * 3,
        "backbone gradients": (share.gradients * (parts > 1), share.gradients, share.gradients),
        "gathered blocks": (0, share.gathered, 0),
        "activations": (backbone.activations * during_head, max(0, backbone.backward), 0),
        **_of_head(head),
        "optimizer's temporaries": (0, 0, _temporaries(recipe, backbone, share, head)),
    }
    if cluster.machine.kind == "cuda":
        table["CUDA and NCCL (assumed)"] = (_CUDA_RESERVE,) * 3
    lines = {what: sizes for what, sizes in table.items() if any(sizes)}
    return MemoryTable(DEVICE_PHASES, lines, cluster.machine.memory)


def _of_head(head: Head) -> dict[str, tuple[int, ...]]:
    if head.is_factored:  # d x d matrices, and two copies of the features of all ranks, in float64
        square = 6 * head.dim**2 * _FLOAT64
        world_rows = head.group_rows * head.cluster.sizes["data"]
        rows = world_rows * head.dim * (head.feature_bytes + 2 * _FLOAT64)
        return {"factored head's sums and rows": (square + rows, square, square + rows)}
    kept = head.gradients
    # Gradients of bf16 rows are float32 sums, which are then rounded.
    first = kept * (2 if head.calls > 1 and not head.is_fused else 1)
    if head.row_dtype != torch.float32 and not head.is_fused:
        first += head.float32_gradients
    rows = head.group_rows * head.dim
    features = rows * (head.compute_bytes + FLOAT32) + head.rows * head.dim * head.feature_bytes
    return {
        "head gradients": (first, kept, kept),
        "features and their gradients": (features, 0, 0),
        "head blocks": (head.block_bytes, 0, 0),
    }


def _temporaries(recipe: Recipe, backbone: BackboneCost, share: BackboneShare, head: Head) -> int:
    """Return the bytes that an optimizer step allocates: the squared gradients of the head, for
    their norm, or the optimizer's copies. bf16 and fp8 rows are updated in pieces."""
    shard = head.shard if head.row_dtype == torch.float32 and not head.is_fused else 0
    if not recipe.optimizer.copies_tensors:
        return shard
    largest = max(shape.numel() for unit in backbone.units for shape in unit) * FLOAT32
    return max(share.updated, shard) + 2 * max(largest, shard)


@dataclass(frozen=True)
class ClassListCost:
    """Bytes of main memory per class, measured with 100,000 and 1,000,000 classes.

    kept: held throughout the run. parsing: the peak while the manifest is parsed and its checksum
    is computed.
    """

    kept: float
    parsing: float

    @classmethod
    def of(cls, classes: Sequence[ClassInfo]) -> "ClassListCost":
        """Return the mean cost over evenly spaced classes of a class list."""
        costs = [cls._of_class(info) for info in classes[:: max(1, len(classes) // _SAMPLED)]]
        return cls(*(sum(column) / len(costs) for column in zip(*costs, strict=True)))

    @staticmethod
    def _of_class(info: ClassInfo) -> tuple[float, float]:
        """Return the cost of the objects of a class, and with its share of the file and of the
        mappings and the ASCII JSON of which the checksum is computed."""
        kept, mappings = 591 + sys.getsizeof(info.name), 440
        if info.attributes:
            kept += 139 + sum(map(sys.getsizeof, info.attributes.values()))
            mappings += 300
        file, text = info.model_dump_json().encode(), json.dumps(info.model_dump())
        return kept, kept + mappings + len(file) + 2 * len(text)


# If no class list is available: names of 24 characters.
ASSUMED_CLASSES = (ClassInfo(name="a" * 24),)


def host_memory(
    head: Head, device: MemoryTable, extra: dict[str, tuple[int, ...]], *, capacity: int | None
) -> MemoryTable:
    """Return the main memory of a rank. On CPUs, the training step also uses main memory. `extra`
    contains the items that depend on the data and on the checkpoint.

    Every rank parses the manifest and stores the class list as Python objects. Loader processes are
    not counted, because they are forked and share the list copy-on-write.
    """
    nodes = head.classes.nodes
    is_cpu = head.cluster.machine.kind == "cpu"
    table = {
        "Python and libraries": (_PROCESS_BYTES,) * 3,
        **extra,
        "label tree": (0, _TREE_BYTES * nodes, _KEPT_TREE_BYTES * nodes),
        "first rows": (0, head.shard * is_cpu, 0),  # on GPUs, they are generated on the device
        "a step, as above": (0, 0, device.peak * is_cpu),
    }
    lines = {what: sizes for what, sizes in table.items() if any(sizes)}
    return MemoryTable(HOST_PHASES, lines, capacity, ranks=head.cluster.gpus)


def class_list(cost: ClassListCost, num_classes: int) -> tuple[int, int, int]:
    """Return the bytes of the class list in each phase. While the head is built, a rank also has a
    tuple of the class names and each class's number of samples."""
    kept = int(cost.kept * num_classes)
    return int(cost.parsing * num_classes), kept + 2 * _INT64 * num_classes, kept


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
        themselves. Ranks hash a share of the files, and then read what they need.
        """
        cluster, averages = head.cluster, recipe.train.ema is not None
        moments = 0 if head.is_factored or head.is_fused else recipe.optimizer.num_moments
        shard = (1 + averages) * head.shard + moments * head.moment
        whole = (1 + averages + recipe.optimizer.num_moments) * backbone.numel * FLOAT32
        whole += (1 + averages) * backbone.buffers
        copies = 1 + averages + moments
        of_rank = -(-copies // cluster.sizes["data"]) * head.shard + -(-whole // cluster.ranks)
        size = shard * cluster.class_ranks + whole
        of_machine = size / cluster.nodes
        read = min(cluster.gpus, cluster.class_ranks) * shard + whole
        hashing = of_machine / cluster.gpus / _HASHED_PER_SECOND
        return cls(
            size=size,
            of_rank=of_rank,
            save=of_machine / storage + hashing,
            resume=(of_machine + read) / storage + hashing,
        )

    def interval(self, *, failures_per_second: float) -> float:
        """Return the seconds between checkpoints for which saving and repeated steps cost the least
        (Young 1974, Daly 2006)."""
        return math.sqrt(2 * self.save / failures_per_second)

"""Main memory that a machine's ranks need to read the class list, build the head and train.

Every rank parses the manifest and stores the class list as Python objects. Loader processes are not
counted, because they are forked and share the list copy-on-write.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.shards.manifest import ClassInfo
from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster
from launch.plan.device_memory import Memory
from launch.plan.head_cost import HeadShape
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32

HostMoment = Literal["manifest", "head", "training"]
HOST_MOMENTS: tuple[HostMoment, ...] = ("manifest", "head", "training")

# Measured resident memory of Python, torch, transformers and the trainer on a CPU.
_PROCESS_BYTES = 450 << 20
_INT64 = 8
_SAMPLED = 1000
# Bytes per node of the label tree while the head is built and afterwards. Measured with 300,000 and
# 2,000,000 classes.
_TREE_BYTES, _KEPT_TREE_BYTES = 64, 57


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

    @classmethod
    def assumed(cls) -> "ClassListCost":
        """Return the cost if no class list is available: names of 24 characters, no attributes."""
        return cls(*cls._of_class(ClassInfo(name="a" * 24)))

    @staticmethod
    def _of_class(info: ClassInfo) -> tuple[float, float]:
        """Return the cost of one class.

        In addition to the objects, parsing needs memory for the file. The checksum needs the
        classes as mappings and as ASCII JSON, both as text and as bytes.
        """
        kept, mappings = 591 + sys.getsizeof(info.name), 440
        if info.attributes:
            kept += 139 + sum(map(sys.getsizeof, info.attributes.values()))
            mappings += 300
        file, text = info.model_dump_json().encode(), json.dumps(info.model_dump())
        return kept, kept + mappings + len(file) + 2 * len(text)


@dataclass(frozen=True)
class HostLine:
    """Bytes of one item of a rank's main memory in each phase.

    manifest: while the manifest is parsed. head: the peak while the head is built.
    """

    what: str
    manifest: int = 0
    head: int = 0
    training: int = 0


@dataclass(frozen=True)
class HostMemory:
    """The main memory of one rank, by item.

    ranks: number of ranks on the machine. capacity: main memory of the machine, or None if unknown.
    """

    lines: tuple[HostLine, ...]
    ranks: int
    capacity: int | None

    def total(self, moment: HostMoment) -> int:
        """Return the bytes of one rank in this phase."""
        return sum(getattr(line, moment) for line in self.lines)

    @property
    def peak_moment(self) -> HostMoment:
        """The phase in which a rank needs the most memory."""
        return max(HOST_MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        """Peak bytes of all ranks of a machine together."""
        return self.ranks * self.total(self.peak_moment)

    @property
    def fits(self) -> bool | None:
        """Whether the machine has enough memory; None if its capacity is unknown."""
        return None if self.capacity is None else self.peak <= self.capacity


def host_memory(
    recipe: Recipe,
    backbone: BackboneCost,
    head: HeadShape,
    memory: Memory,
    cluster: Cluster,
    cost: ClassListCost,
    *,
    label_vectors: int,
    sample_list: int,
    capacity: int | None,
) -> HostMemory:
    """Return the main memory of one machine of the cluster.

    On CPUs, the training step also uses main memory. label_vectors: bytes of the shards' label
    vectors. sample_list: bytes of the list of samples of `data.sampling`.
    """
    classes, nodes = head.classes.num_classes, head.classes.nodes
    kept, parsing = int(cost.kept * classes), int(cost.parsing * classes)
    # While the head is built: a tuple of the class names, and each class's number of samples.
    building = kept + 2 * _INT64 * classes
    # The initial rows are generated on the device.
    rows = head.shard if cluster.machine.kind == "cpu" else 0
    lines = [
        HostLine("Python and libraries", *[_PROCESS_BYTES] * 3),
        HostLine("class list", parsing, building, kept),
        HostLine("label vectors", 0, label_vectors, label_vectors),
        HostLine("label tree", 0, _TREE_BYTES * nodes, _KEPT_TREE_BYTES * nodes),
        HostLine("first rows", 0, rows, 0),
        HostLine("list of samples", 0, 0, sample_list),
        HostLine("checkpoint being written", 0, 0, _checkpoint(recipe, backbone, head, cluster)),
    ]
    if cluster.machine.kind == "cpu":
        lines.append(HostLine("a step, as above", 0, 0, memory.peak))
    nonzero = tuple(line for line in lines if any(getattr(line, m) for m in HOST_MOMENTS))
    return HostMemory(nonzero, cluster.gpus, capacity)


def _checkpoint(recipe: Recipe, backbone: BackboneCost, head: HeadShape, cluster: Cluster) -> int:
    """Return the bytes of the host copy of a rank's checkpoint (`trainer/checkpoints/writer.py`).

    The copy is reused for the next save.
    """
    if not recipe.checkpoint.in_background:
        return 0
    shard = head.shard
    factored = recipe.head.weights.kind == "factored"
    copies = 1 + (recipe.train.ema is not None)
    moments = 0 if factored or head.fused else recipe.optimizer.num_moments
    # Each shard of the head exists once per class group. The groups divide its tensors among
    # themselves, and each group writes whole tensors.
    size = -(-(copies + moments) // cluster.data_ranks) * shard
    whole = (copies + recipe.optimizer.num_moments) * backbone.numel * FLOAT32
    size += -(-(whole + copies * backbone.buffers) // cluster.ranks)
    # torch rounds pinned memory up to a power of two.
    return 1 << (size - 1).bit_length() if cluster.machine.kind == "cuda" else size

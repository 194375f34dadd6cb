"""Device memory of the rank that needs the most memory, by item and phase of a step."""

from dataclasses import dataclass
from typing import Literal

import torch

from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster
from launch.plan.head_cost import HeadShape
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32, Spread

Moment = Literal["head", "backward", "optimizer"]
MOMENTS: tuple[Moment, ...] = ("head", "backward", "optimizer")
_INT64 = _FLOAT64 = 8
# The CUDA context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers. Assumed, not measured.
_CUDA_RESERVE = 2 << 30


@dataclass(frozen=True)
class Line:
    """Bytes of one item in each phase of a step. `head` is the backward pass of the head.

    lasts: whether the item also persists between steps.
    """

    what: str
    head: int = 0
    backward: int = 0
    optimizer: int = 0
    lasts: bool = False


@dataclass(frozen=True)
class Memory:
    """All items, and the memory of the device in bytes."""

    lines: tuple[Line, ...]
    capacity: int

    def total(self, moment: Moment) -> int:
        return sum(getattr(line, moment) for line in self.lines)

    @property
    def lasting(self) -> int:
        """Bytes that persist between steps."""
        return sum(line.head for line in self.lines if line.lasts)

    @property
    def peak_moment(self) -> Moment:
        """The phase with the highest memory use."""
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_moment)

    @property
    def missing(self) -> int:
        """Bytes by which the peak exceeds the capacity; zero or negative if the peak fits."""
        return self.peak - self.capacity

    @property
    def fits(self) -> bool:
        return self.missing <= 0


def memory_of(
    recipe: Recipe,
    backbone: BackboneCost,
    spread: Spread,
    head: HeadShape,
    cluster: Cluster,
    parts: int,
) -> Memory:
    """Return the memory of one rank during a step of `parts` micro-batches."""
    shard = head.shard
    factored = recipe.head.weights.kind == "factored"
    cuda = cluster.machine.kind == "cuda"
    updated = spread.updated + (0 if factored else head.moment)
    lines = [
        _always("backbone weights", spread.weights),
        _always("head weights", shard),
        _always("optimizer moments", recipe.optimizer.num_moments * updated),
        _always("moving averages", _averages(recipe, backbone, spread, head)),
        _always("inputs and buffers", backbone.inputs * parts + backbone.buffers),
        _always("class index", class_index(head)),
        _always("strategy's buckets", spread.buckets),
        _gradients(spread, parts),
        Line("gathered blocks", backward=spread.gathered),
        _activations(backbone, during_head=parts == 1 or not recipe.calls_head_once),
        *(_factored_head(head) if factored else _head(head)),
        Line(
            "optimizer's temporaries", optimizer=_temporaries(recipe, backbone, spread, head, cuda)
        ),
    ]
    if cuda:
        lines.append(_always("CUDA and NCCL (assumed)", _CUDA_RESERVE))
    return Memory(tuple(line for line in lines if _any(line)), cluster.machine.memory)


def class_index(head: HeadShape) -> int:
    """Return the size in bytes of the index in `ClassWeights` and of the loss's constants.

    Every rank stores the row of every class. For its own classes it also stores the paths, their
    lengths and the order in which gradients are summed.
    """
    classes = head.classes
    own = min(head.nodes, -(-head.nodes * classes.num_classes // classes.nodes))
    size = _INT64 * (classes.num_classes + own) + int(head.loss.constants * classes.num_classes)
    if classes.plain:
        return size
    inner = -(-classes.inner * head.nodes // classes.nodes)
    paths = int(own * classes.depth) * 4 + 4 * _INT64 * own
    return size + paths + _INT64 * (head.nodes + (head.nodes - own) + 4 * inner)


def _always(what: str, size: int) -> Line:
    return Line(what, size, size, size, lasts=True)


def _any(line: Line) -> bool:
    return any(getattr(line, moment) for moment in MOMENTS)


def _averages(recipe: Recipe, backbone: BackboneCost, spread: Spread, head: HeadShape) -> int:
    if recipe.train.ema is None:
        return 0
    return spread.updated + backbone.buffers + head.float32_gradients  # averages are float32 too


def _gradients(spread: Spread, parts: int) -> Line:
    """Return the gradients of the backbone.

    They are live while the head runs, except during the first micro-batch.
    """
    size = spread.gradients
    return Line("backbone gradients", size if parts > 1 else 0, size, size)


def _activations(backbone: BackboneCost, *, during_head: bool) -> Line:
    """Return the activations of one micro-batch, with temporaries at the peak of backward.

    With gradient caching, the head runs before any activations exist.
    """
    backward = backbone.backward_peak - backbone.gradients
    return Line("activations", backbone.activations if during_head else 0, max(0, backward))


def _head(head: HeadShape) -> list[Line]:
    kept = head.gradients
    if head.fused:
        gradients = kept
    elif head.row_dtype == torch.float32:
        gradients = kept if head.calls == 1 else 2 * kept
    else:  # the float32 sums, which are then rounded
        gradients = head.float32_gradients + (kept if head.calls == 1 else 2 * kept)
    rows = head.group_rows * head.dim
    features = rows * head.itemsize + head.rows * head.dim * head.feature_itemsize
    return [
        Line("head gradients", gradients, kept, kept),
        Line("features and their gradients", features + rows * FLOAT32),
        Line("head blocks", _blocks(head)),
    ]


def _blocks(head: HeadShape) -> int:
    """Return the bytes saved for all blocks plus the temporaries of one block."""
    block, loss = head.group_rows * head.block_classes, head.loss
    half = head.itemsize < FLOAT32
    work = 2 * head.blocks * head.group_rows * loss.width * FLOAT32
    work += int(block * loss.peak) + block * head.itemsize * half  # the gradient of the logits
    if not head.classes.plain:
        work += head.block_classes * head.dim * FLOAT32
    if head.normalizes:
        # The normalized copy of the rows, its gradient, and two products with the copy.
        work += 4 * head.block_classes * head.dim * FLOAT32
    if half:
        work += head.block_classes * head.dim * 2 * head.itemsize
    if head.graphs:
        # The temporaries above already include the graph of one block.
        kept = (head.logits - block) * loss.kept
        return work + int(head.logits * FLOAT32 + kept)
    return work + head.kept_numbers * FLOAT32


def _factored_head(head: HeadShape) -> list[Line]:
    """Return the memory of six float64 d x d matrices and two copies of all ranks' features."""
    square = 6 * head.dim**2 * _FLOAT64
    rows = head.world_rows * head.dim * (head.feature_itemsize + 2 * _FLOAT64)
    return [Line("factored head's sums and rows", square + rows, square, square + rows)]


def _temporaries(
    recipe: Recipe, backbone: BackboneCost, spread: Spread, head: HeadShape, cuda: bool
) -> int:
    """Return the bytes that an optimizer step allocates."""
    # bf16 and fp8 rows are updated in pieces.
    shard = head.shard if head.row_dtype == torch.float32 and not head.fused else 0
    largest = max(max((_bytes(shape) for shape in backbone.shapes), default=0), shard)
    together = max(spread.updated, shard)
    copies = recipe.optimizer.temporaries(together=together, largest=largest, cuda=cuda)
    return max(copies, shard)  # the squared gradients of the head, for their norm


def _bytes(shape: tuple[int, ...]) -> int:
    size = FLOAT32
    for length in shape:
        size *= length
    return size

"""The bytes of the fullest rank: what lasts, and what each phase of a step adds to it."""

from dataclasses import dataclass
from typing import Literal

from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster
from launch.plan.head_cost import HeadShape
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32, Spread

Moment = Literal["head", "backward", "optimizer"]
MOMENTS: tuple[Moment, ...] = ("head", "backward", "optimizer")
_INT64 = _FLOAT64 = 8
# The CUDA context, cuBLAS and cuDNN workspaces and NCCL's buffers: an assumption, not measured.
_CUDA_RESERVE = 2 << 30


@dataclass(frozen=True)
class Line:
    """Something that takes memory, in each phase of a step; the head's is its backward. `lasts`:
    it is there between steps, too."""

    what: str
    head: int = 0
    backward: int = 0
    optimizer: int = 0
    lasts: bool = False


@dataclass(frozen=True)
class Memory:
    """All of them, and what there is."""

    lines: tuple[Line, ...]
    capacity: int

    def total(self, moment: Moment) -> int:
        return sum(getattr(line, moment) for line in self.lines)

    @property
    def lasting(self) -> int:
        """What is there between steps."""
        return sum(line.head for line in self.lines if line.lasts)

    @property
    def peak_moment(self) -> Moment:
        """The phase that needs the most."""
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_moment)

    @property
    def missing(self) -> int:
        """Bytes that are not there; below 0 what is left."""
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
    """Of one rank, through a step of `parts` micro-batches."""
    shard = head.shard
    factored = recipe.head.weights.kind == "factored"
    cuda = cluster.machine.kind == "cuda"
    updated = spread.updated + (0 if factored else shard)
    lines = [
        _always("backbone weights", spread.weights),
        _always("head weights", shard),
        _always("optimizer moments", recipe.optimizer.num_moments * updated),
        _always("moving averages", _averages(recipe, backbone, spread, shard)),
        _always("inputs and buffers", backbone.inputs * parts + backbone.buffers),
        _always("class index", class_index(head)),
        _always("strategy's buckets", spread.buckets),
        _gradients(spread, parts),
        Line("gathered blocks", backward=spread.gathered),
        _activations(backbone, during_head=parts == 1 or not head.loss.couples_rows),
        *(_factored_head(head) if factored else _head(head, shard)),
        Line(
            "optimizer's temporaries", optimizer=_temporaries(recipe, backbone, spread, shard, cuda)
        ),
    ]
    if cuda:
        lines.append(_always("CUDA and NCCL (assumed)", _CUDA_RESERVE))
    return Memory(tuple(line for line in lines if _any(line)), cluster.machine.memory)


def class_index(head: HeadShape) -> int:
    """Integers of `ClassWeights`: every rank knows the place of every class, and of its own the
    paths, their lengths and the order in which gradients are summed; and the loss's constants."""
    classes = head.classes
    held = min(head.nodes, -(-head.nodes * classes.num_classes // classes.nodes))
    size = _INT64 * (classes.num_classes + held) + int(head.loss.constants * classes.num_classes)
    if classes.plain:
        return size
    inner = -(-classes.inner * head.nodes // classes.nodes)
    paths = int(held * classes.depth) * 4 + 4 * _INT64 * held
    return size + paths + _INT64 * (head.nodes + (head.nodes - held) + 4 * inner)


def _always(what: str, size: int) -> Line:
    return Line(what, size, size, size, lasts=True)


def _any(line: Line) -> bool:
    return any(getattr(line, moment) for moment in MOMENTS)


def _averages(recipe: Recipe, backbone: BackboneCost, spread: Spread, shard: int) -> int:
    if recipe.train.ema is None:
        return 0
    return spread.updated + backbone.buffers + shard


def _gradients(spread: Spread, parts: int) -> Line:
    """From the second part on they are there while the head computes."""
    size = spread.gradients
    return Line("backbone gradients", size if parts > 1 else 0, size, size)


def _activations(backbone: BackboneCost, *, during_head: bool) -> Line:
    """Of one part; those left in backward, and its temporaries, when it needs the most. Under
    gradient caching the head comes before there are any."""
    backward = backbone.backward_peak - backbone.numel * FLOAT32
    return Line("activations", backbone.activations if during_head else 0, max(0, backward))


def _head(head: HeadShape, shard: int) -> list[Line]:
    gradients = shard if head.calls == 1 else 2 * shard
    rows = head.group_rows * head.dim
    features = rows * head.itemsize + head.rows * head.dim * head.feature_itemsize
    return [
        Line("head gradients", gradients, shard, shard),
        Line("features and their gradients", features + rows * FLOAT32),
        Line("head blocks", _blocks(head)),
    ]


def _blocks(head: HeadShape) -> int:
    """What is kept of all blocks, and the temporaries of one."""
    block, loss = head.group_rows * head.block_classes, head.loss
    half = head.itemsize < FLOAT32
    work = 2 * head.blocks * head.group_rows * loss.width * FLOAT32
    work += int(block * loss.peak) + block * head.itemsize * half
    if not head.classes.plain:
        work += head.block_classes * head.dim * FLOAT32
    if head.normalizes:
        # Of the rows: their copy over their norms, its gradient and two products of it.
        work += 4 * head.block_classes * head.dim * FLOAT32
    if half:
        work += head.block_classes * head.dim * 2 * head.itemsize
    if head.graphs:
        # One block's graph is among its temporaries already.
        kept = (head.logits - block) * loss.kept
        return work + int(head.logits * FLOAT32 + kept)
    return work + head.kept_numbers * head.itemsize + block * FLOAT32 * half


def _factored_head(head: HeadShape) -> list[Line]:
    """Sums of d x d in float64, and the world's features twice."""
    square = 6 * head.dim**2 * _FLOAT64
    rows = head.world_rows * head.dim * (head.feature_itemsize + 2 * _FLOAT64)
    return [Line("factored head's sums and rows", square + rows, square, square + rows)]


def _temporaries(
    recipe: Recipe, backbone: BackboneCost, spread: Spread, shard: int, cuda: bool
) -> int:
    """Bytes that the optimizer's step allocates."""
    largest = max(max((_bytes(shape) for shape in backbone.shapes), default=0), shard)
    together = max(spread.updated, shard)
    copies = recipe.optimizer.temporaries(together=together, largest=largest, cuda=cuda)
    return max(copies, shard)  # the head's squared gradients, for the norm


def _bytes(shape: tuple[int, ...]) -> int:
    size = FLOAT32
    for length in shape:
        size *= length
    return size

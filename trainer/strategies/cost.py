"""The cost of a strategy per rank: the bytes in memory and the collectives of one step.

The planner (`launch/plan/`) sums these costs. `tests/launch/test_plan_measured.py` compares them
with the collectives of real steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# `shard` contains the ranks that share one copy of the backbone, and `replicate` contains the ranks
# with the same piece of each copy.
Group = Literal["class", "data", "shard", "replicate", "world"]
Operation = Literal["all_gather", "all_reduce", "reduce_scatter", "broadcast", "reduce"]
Phase = Literal["forward", "head", "backward", "optimizer", "step"]
# The shapes of a group of weights, such as those of a transformer block.
Shapes = Sequence[tuple[int, ...]]

FLOAT32 = 4


@dataclass(frozen=True)
class Collective:
    """A collective that runs `calls` times per step, with `bytes` bytes and `messages` messages per
    call.

    `bytes` counts the full tensor: the input of an all-reduce or reduce-scatter, or the output of
    an all-gather. `hidden` means that the collective overlaps with other work in its phase.
    `copies` is the number of kernels per call that copy tensors to or from the buffers of the
    messages, convert them or add them up, and `copied` is the number of bytes that these kernels
    read and write.
    """

    what: str
    operation: Operation
    group: Group
    bytes: int
    phase: Phase
    calls: int = 1
    hidden: bool = False
    messages: int = 1
    copies: int = 0
    copied: int = 0

    @property
    def total(self) -> int:
        """The number of bytes of all calls."""
        return self.bytes * self.calls


@dataclass(frozen=True)
class Spread:
    """The number of bytes on the rank that requires the most memory, and the collectives of a step.

    `weights` and `gradients` persist. `updated` is the part of the weights that the rank's
    optimizer updates. `buckets` are the strategy's own buffers. `gathered` exists only during
    backward. `adds_parts` means that the copies of `collectives` include the kernels that add up
    the gradients of micro-batches. Otherwise, autograd does this, with one kernel per weight.
    """

    weights: int
    gradients: int
    updated: int
    buckets: int
    gathered: int
    collectives: tuple[Collective, ...]
    adds_parts: bool = False

    @classmethod
    def alone(cls, units: Sequence[Shapes]) -> "Spread":
        """Return the cost for a single process, which stores the entire backbone."""
        whole = sum(numel(unit) for unit in units) * FLOAT32
        return cls(whole, whole, whole, 0, 0, ())


def numel(shapes: Shapes) -> int:
    """Return the number of elements of all weights."""
    return sum(_product(shape) for shape in shapes)


def padded_numel(shapes: Shapes, ranks: int) -> int:
    """Return the number of elements once the rows of all weights are padded to a multiple of
    `ranks`."""
    total = 0
    for rows, *rest in (shape or (1,) for shape in shapes):
        total += -(-rows // ranks) * ranks * _product(rest)
    return total


def summed(
    what: str, size: int, *, calls: int = 1, group: Group = "world", **counts: int
) -> Collective:
    """Return an all-reduce of gradients that overlaps with backward."""
    return Collective(what, "all_reduce", group, size, "backward", calls, hidden=True, **counts)


def gathered(what: str, size: int, phase: Phase, calls: int, **counts: int) -> Collective:
    """Return an all-gather of weights."""
    hidden = phase != "optimizer"
    return Collective(what, "all_gather", "shard", size, phase, calls, hidden=hidden, **counts)


def scattered(what: str, size: int, calls: int, **counts: int) -> Collective:
    """Return a reduce-scatter of gradients that overlaps with backward."""
    return Collective(
        what, "reduce_scatter", "shard", size, "backward", calls, hidden=True, **counts
    )


def _product(lengths: Sequence[int]) -> int:
    total = 1
    for length in lengths:
        total *= length
    return total

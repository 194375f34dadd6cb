"""`Workload`, the input of a doctor check, and `Finding`, its output.

Does not import torch, because the installation of torch may be broken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from launch.recipe_inputs import RecipeInput
    from trainer.config import Recipe


Level = Literal["ok", "warning", "error"]
# Batches that a loader process keeps in shared memory: two prefetched, one being created and one
# being copied (`data/loading/workers.py`).
_BATCHES_PER_WORKER = 4
_ASSUMED_WORKERS = 4
_ASSUMED_BATCH = 256
_ASSUMED_SAMPLE_BYTES = 224 * 224 * 3


@dataclass(frozen=True)
class Finding:
    """The result of a check, with a fix (`remedy`) unless the level is ok."""

    level: Level
    topic: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.remedy), "set remedy unless the level is ok"


def ok(topic: str, found: str) -> Finding:
    """Create a finding for a check that found no problem."""
    return Finding("ok", topic, found)


def warning(topic: str, found: str, remedy: str) -> Finding:
    """Create a finding for a problem that may slow down training or make it fail later."""
    return Finding("warning", topic, found, remedy)


def error(topic: str, found: str, remedy: str) -> Finding:
    """Create a finding for a problem that prevents training from starting or may lose data."""
    return Finding("error", topic, found, remedy)


def in_gib(num_bytes: float) -> str:
    """Format as `1.5 GiB`, or as `200 MiB` below 1 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.0f} MiB"


@dataclass(frozen=True)
class Workload:
    """The training run that this machine is checked for.

    workers: loader processes per rank, or None without a recipe. shared_bytes: memory in /dev/shm
    that the loader processes of all ranks on this machine use. Its default assumes four workers per
    rank and a global batch of 256 images of 224 x 224 pixels.
    """

    run: Path
    ranks: int = 2
    workers: int | None = None
    shared_bytes: int = (
        _BATCHES_PER_WORKER * _ASSUMED_WORKERS * _ASSUMED_BATCH * _ASSUMED_SAMPLE_BYTES
    )
    port: int | None = None
    peers: tuple[str, ...] = ()
    inputs: "tuple[RecipeInput, ...]" = ()

    @property
    def several_machines(self) -> bool:
        return self.port is not None or bool(self.peers)


def workload_of(
    recipe: "Recipe", *, ranks: int, port: int | None, peers: tuple[str, ...]
) -> Workload:
    """Return the workload of `recipe` if this machine runs all of its `ranks`."""
    data = recipe.data
    if data.text is None:
        sample = data.largest_side**2 * data.image.channels
    else:
        sample = 2 * 8 * data.text.max_length  # ids and mask, int64
    shared = _BATCHES_PER_WORKER * data.workers * recipe.train.global_batch * sample
    return Workload(recipe.run, ranks, data.workers, shared, port, peers)

"""What a check of the doctor reads, `Workload`, and what it yields, `Finding`.

Does not import torch, whose installation may be broken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainer.config import Recipe


Level = Literal["ok", "warning", "error"]
# torch's loader processes each hold so many batches: two asked for ahead, one being made, one being
# copied (`data/loading/workers.py`).
_BATCHES_HELD = 4
_ASSUMED_WORKERS = 4
_ASSUMED_BATCH = 256
_ASSUMED_BYTES_A_SAMPLE = 224 * 224 * 3


@dataclass(frozen=True)
class Finding:
    """`found` says what is so; a warning's or an error's `remedy` says what to do about it."""

    level: Level
    topic: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.remedy), "a remedy for all that is not ok"


def ok(topic: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, found)


def warning(topic: str, found: str, remedy: str) -> Finding:
    """Training starts, and may be slow, or fail later or elsewhere."""
    return Finding("warning", topic, found, remedy)


def error(topic: str, found: str, remedy: str) -> Finding:
    """Training does not start, or would lose something."""
    return Finding("error", topic, found, remedy)


def in_gib(num_bytes: float) -> str:
    """`1.5 GiB`; below that `200 MiB`."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.0f} MiB"


@dataclass(frozen=True)
class Workload:
    """What this machine is going to run.

    `shared_bytes` is what the loader processes of all ranks here hold in /dev/shm.

    Without a recipe `workers`, the loader processes of a rank, is None and the bytes are those of
    four with pictures of 224 x 224 pixels.
    """

    run: Path
    ranks: int = 2
    workers: int | None = None
    shared_bytes: int = _BATCHES_HELD * _ASSUMED_WORKERS * _ASSUMED_BATCH * _ASSUMED_BYTES_A_SAMPLE
    port: int | None = None
    peers: tuple[str, ...] = ()

    @property
    def several_machines(self) -> bool:
        return self.port is not None or bool(self.peers)


def workload_of(
    recipe: "Recipe", *, ranks: int, port: int | None, peers: tuple[str, ...]
) -> Workload:
    """The workload of `recipe` with all of its `ranks` on this machine."""
    data = recipe.data
    if data.text is None:
        sample = data.largest_side**2 * data.image.channels
    else:
        sample = 2 * 8 * data.text.max_length  # ids and mask, int64
    held = _BATCHES_HELD * data.workers * recipe.train.global_batch * sample
    return Workload(recipe.run, ranks, data.workers, held, port, peers)

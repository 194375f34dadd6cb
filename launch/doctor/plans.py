"""What this machine is going to run, which decides what the doctor checks.

Does not import torch, which may be broken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Recipe

# torch's loader processes each hold so many batches: two asked for ahead, one being made, one being
# copied (`data/loading/workers.py`, which would load torch).
_BATCHES_HELD = 4
_ASSUMED_WORKERS = 4
_ASSUMED_BATCH = 256
_ASSUMED_BYTES_A_SAMPLE = 224 * 224 * 3


@dataclass(frozen=True)
class Plans:
    """`shared_bytes` is what the loader processes of all ranks here hold in /dev/shm.

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


def plans_of(recipe: "Recipe", *, ranks: int, port: int | None, peers: tuple[str, ...]) -> Plans:
    """What a recipe needs when all its ranks run here, `ranks` of them."""
    data = recipe.data
    if data.text is None:
        sample = data.largest_side**2 * data.image.channels
    else:
        sample = 2 * 8 * data.text.max_length  # ids and mask, int64
    held = _BATCHES_HELD * data.workers * recipe.train.global_batch * sample
    return Plans(recipe.run, ranks, data.workers, held, port, peers)

"""How long a background save of a checkpoint stalls training, relative to a synchronous save."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.timing import Row, ratio_row
from trainer.checkpoints import CheckpointWriter
from trainer.config import CheckpointConfig
from trainer.world import World

STATE_BYTES, ROUNDS, NUM_STEPS = 200 * 2**20, 9, 20
_NUM_TENSORS = 40


def rows() -> Iterator[Row]:
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    entries = {
        f"backbone.{number}": torch.randn(STATE_BYTES // 4 // _NUM_TENSORS // 1024, 1024)
        for number in range(_NUM_TENSORS)
    }
    matrix = torch.randn(512, 512)
    found: dict[str, list[float]] = {}

    def clock(name: str, part: Callable[[], object]) -> None:
        started = time.perf_counter()
        part()
        found.setdefault(name, []).append(time.perf_counter() - started)

    def steps() -> None:
        for _ in range(NUM_STEPS):
            torch.mm(matrix, matrix)

    with TemporaryDirectory() as folder:  # on the disk of TMPDIR

        def writer(name: str, *, in_background: bool) -> CheckpointWriter:
            config = CheckpointConfig(keep_last=1, in_background=in_background)
            return CheckpointWriter(Path(folder) / name, config, world, start_step=0)

        with (
            writer("sync", in_background=False) as waited,
            writer("background", in_background=True) as background,
        ):
            for number in range(ROUNDS + 1):
                state = {"step": number}
                clock("sync", partial(waited.save, entries, state))
                clock("steps", steps)
                clock("stall", partial(background.save, entries, state))
                clock("busy steps", steps)
                background.finish()
    times = {name: np.array(each[1:]) for name, each in found.items()}  # without a warm-up round
    case = f"{STATE_BYTES >> 20} MB, one rank"
    what = "stall of a background save / synchronous save"
    yield ratio_row(what, case, times["stall"], times["sync"], 0.10)
    what = f"{NUM_STEPS} products during a background save / without a save"
    yield ratio_row(what, case, times["busy steps"], times["steps"])

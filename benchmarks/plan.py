"""`kway plan` compared with measured steps on this CPU: `python -m benchmarks.plan [SECTION ...]`.

The cases are those of `benchmarks.heads engine` and `benchmarks.trainer step`. The planner measures
this machine's operations, one at a time and on arbitrary numbers; it never runs a step.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import trainer_step
from benchmarks.head_step import DIM, Step
from benchmarks.report import Sections, command_line, report
from benchmarks.timing import Row, take_turns
from heads import ClassHead
from launch.plan.cluster import machine_named
from launch.plan.plan import PlanRequest, make_plan
from trainer.config import Recipe
from trainer.recipe import build_recipe
from trainer.world import open_world

_WITHIN = 0.25
_STEPS = trainer_step.STEPS


class Features(nn.Module):
    """An encoder of almost no cost, for plans of the head alone."""

    dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels[:, :1, 0, :1].flatten(1) + self.bias


def heads() -> Iterator[Row]:
    """Compare the head of a step: dense weights and `ce`, forward and backward."""
    for classes, batch, memory_mib in (
        (1_000, 256, 256),
        (10_000, 256, 256),
        (100_000, 256, 256),
        (100_000, 256, 1024),
        (100_000, 1024, 256),
    ):
        head = ClassHead(DIM, classes, loss, memory_mib=memory_mib)

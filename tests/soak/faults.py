"""Runs on two ranks in which a step fails. The result does not depend on whether the host waits for
each step.
"""

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from tests.shards import glyph_shards
from tests.soak.trials import Trial
from tests.system.processes import ROOT
from tests.system.runs import launched, losses, read_lines

_NUM_STEPS, _BATCH = 8, 12
Failure = Literal["none", "nan", "overflow"]


class FailingBackbone(nn.Module):
    """Two layers that fail on one rank, in training pass number `at`, counted from 1: the features
    become NaN, or their gradient becomes infinite."""

    def __init__(self, failure: Failure = "none", rank: int = 0, at: int = 0) -> None:
        super().__init__()
        self.dim = 8
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
        self._failure = failure if int(os.environ.get("RANK", "0")) == rank else "none"
        self._at, self._num_passes = at, 0

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.layers(pixels).mean((2, 3))
        self._num_passes += self.training and torch.is_grad_enabled()
        if self.training and self._num_passes == self._at:
            if self._failure == "nan":
                features = features * math.nan
            elif self._failure == "overflow":
                features.register_hook(lambda gradient: gradient * math.inf)
        return features


@dataclass(frozen=True)
class Fault:
    """A fault at `step` on `rank`, the keys of `train` that the run needs, and the message that it
    must print, if any."""

    name: str
    rank: int
    step: int
    failure: Failure = "none"
    train: dict[str, Any] | None = None
    message: str = ""

    @classmethod
    def nan(cls, rank: int, step: int) -> "Fault":
        message = f"step {step}: the loss is NaN; on rank {rank}, "
        return cls("NaN", rank, step, "nan", {"max_skipped_steps": 1}, message)

    @classmethod
    def overflow(cls, rank: int, step: int) -> "Fault":
        return cls("fp16 overflow", rank, step, "overflow", {"precision": "fp16"})

    def recipe(self, shards: Path, run: Path, *, synchronous: bool) -> str:
        backbone = {
            "kind": f"{__name__}:FailingBackbone",
            "failure": self.failure,
            "rank": self.rank,
            "at": self.step + 1,  # DDP runs an additional pass before the first step
            # With synchronized statistics, the features of all ranks would become NaN.
            "batch_norm": "local",
        }
        tree = {
            "run": str(run),
            "data": {
                "shards": str(shards),
                "image": {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]},
                "augment": {"crop_area": [0.7, 1.0], "flip": 0},
            },
            "backbone": backbone,
            "optimizer": {"kind": "sgd", "lr": 0.05},
            "train": {
                "duration": {"steps": _NUM_STEPS},
                "global_batch": _BATCH,
                "synchronous": synchronous,
                **(self.train or {}),
            },
            "telemetry": {"log_every": 1, "sample_ids": True},
        }
        return yaml.safe_dump(tree)


FAULTS = (Fault.nan, Fault.overflow)


def fault_runs(folder: Path, count: int, seed: int) -> Iterator[Trial]:
    """Run `count` trials, each with a fault at a random step of a random rank."""
    rng = random.Random(seed)
    for index in range(count):
        fault = FAULTS[index % len(FAULTS)](rng.randrange(2), rng.randint(1, _NUM_STEPS))
        yield compare(fault, folder / str(index))


def compare(fault: Fault, folder: Path) -> Trial:
    """Train with a fault, with synchronous and with deferred steps, and compare the two runs."""
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    results = [
        _train(fault, shards, folder / ("synchronous" if synchronous else "deferred"), synchronous)
        for synchronous in (True, False)
    ]
    wrong = [reason for result in results for reason in result.wrong]
    if not _same(*results):
        wrong.append("the runs differ")
    found = ", ".join(wrong) or "the same losses, samples and skipped steps"
    return Trial(f"{fault.name} on rank {fault.rank} at step {fault.step}", not wrong, found, None)


@dataclass(frozen=True)
class _Result:
    losses: dict[int, float]
    samples: list[list[dict[str, Any]]]
    skipped: list[list[dict[str, Any]]]
    wrong: list[str]


def _train(fault: Fault, shards: Path, run: Path, synchronous: bool) -> _Result:
    recipe = run.with_suffix(".yaml")
    recipe.write_text(fault.recipe(shards, run, synchronous=synchronous))
    with launched(recipe, run, before=("env", f"PYTHONPATH={ROOT}")) as training:
        if code := training.end():
            return _Result({}, [], [], [f"exit code {code}: {training.output.splitlines()[-1]}"])
        reported = fault.message in training.output
    skipped = [read_lines(path) for path in sorted(run.glob("nonfinite-rank*.jsonl"))]
    expected = [fault.step] if fault.failure == "nan" else []
    wrong = [] if reported else [f"{fault.message!r} was not printed"]
    wrong += [] if all([line["step"] for line in one] == expected for one in skipped) else ["skips"]
    if fault.failure == "overflow" and _loss_scale(run) != 2.0**15:
        wrong.append(f"the loss scale is {_loss_scale(run)}, but it should have been halved once")
    return _Result(
        losses(run),
        [read_lines(path) for path in sorted(run.glob("samples-rank*.jsonl"))],
        skipped,
        wrong,
    )


def _loss_scale(run: Path) -> float:
    state = run / "checkpoints" / f"step-{_NUM_STEPS:08d}" / "state.json"
    return float(json.loads(state.read_text())["loss_scale"]["value"])


def _same(one: _Result, other: _Result) -> bool:
    """Compare two runs. Their gradients are scaled in a different order, so the losses are equal
    only up to rounding."""
    steps = range(1, _NUM_STEPS + 1)
    return (
        (one.samples, one.skipped) == (other.samples, other.skipped)
        and sorted(one.losses) == sorted(other.losses) == list(steps)
        and all(_close(one.losses[step], other.losses[step]) for step in steps)
    )


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:  # NaN, which JSON does not support
        return one is other
    return math.isclose(one, other, rel_tol=1e-3)

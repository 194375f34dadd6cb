"""Telemetry opened as the trainer opens it, and its outputs."""

from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.system.runs import read_lines
from trainer.config import TelemetryConfig
from trainer.telemetry.phases import Phases
from trainer.telemetry.telemetry import Telemetry
from trainer.world import World

CPU = torch.device("cpu")
NUMBERS = {
    "loss": 1.25,
    "learning_rate": 0.05,
    "gradient_norm": 3.5,
    "bad_samples": 2,
    "skipped_steps": 1,
}
NUM_STEPS = 100
GLOBAL_BATCH = 12
CHECKPOINT_EVERY = 40


def telemetry(
    folder: Path,
    *,
    start_step: int = 0,
    skipped_steps: int = 0,
    rank: int = 0,
    phases: Phases | None = None,
    **settings: Any,
) -> Telemetry:
    """Return the telemetry of one of two ranks on a machine."""
    return Telemetry(
        folder,
        TelemetryConfig(**settings),
        World(rank, 2, rank, 2, CPU, None),
        start_step=start_step,
        skipped_steps=skipped_steps,
        num_steps=NUM_STEPS,
        global_batch=GLOBAL_BATCH,
        checkpoint_every=CHECKPOINT_EVERY,
        phases=phases or Phases(CPU),
    )


def records(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


def scraped(report: Telemetry) -> dict[str, float]:
    """Return the scraped values, keyed by name and labels (if any)."""
    assert report.endpoint is not None
    page = httpx.get(report.endpoint.url).raise_for_status().text
    return {
        sample.name + "".join(f"/{label}" for label in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }

"""Traces a few steps of a run with torch's profiler."""

from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config import ProfileConfig


class StepProfiler:
    """Traces the steps that `config` selects, and writes the trace of this rank to `path`.

    Call `step` after every step. Does nothing if `config` is None.
    """

    def __init__(self, config: ProfileConfig | None, path: Path, device: torch.device) -> None:
        self.path = path
        self._profiler: profile | None = None
        if config is not None:
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            # The profiler warms up in the step before the first one that it records.
            self._profiler = profile(
                activities=activities,
                schedule=schedule(
                    skip_first=config.first_step - 2,
                    wait=0,
                    warmup=1,
                    active=config.num_steps,
                    repeat=1,
                ),
                on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            )

    def __enter__(self) -> Self:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def step(self) -> None:
        """Record that a step has ended."""
        if self._profiler is not None:
            self._profiler.step()

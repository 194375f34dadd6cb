"""Reports a run's metrics to JSONL, TensorBoard, a Prometheus endpoint per rank, and the console.

All of these receive the same numbers at the same steps. Only rank 0 writes files and prints.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.checkpoints.folders import step_of
from trainer.config import TelemetryConfig
from trainer.faults.stragglers import Stragglers
from trainer.telemetry.jsonl import JsonLines, drop_lines_after
from trainer.telemetry.mfu import ModelFlops, Utilization, peak_flops
from trainer.telemetry.phases import OUTSIDE_STEPS, Phases
from trainer.telemetry.progress import Pace, Screen, memory_bytes
from trainer.telemetry.tensorboard import TensorBoard, check_tensorboard
from trainer.world import World

if TYPE_CHECKING:
    from trainer.telemetry.prometheus import Endpoint, Metrics


class Telemetry(AbstractContextManager["Telemetry"]):
    """The reports of one run. Every rank makes the same calls, but ranks other than rank 0 only
    serve their endpoint. No method waits for another rank.

    `flops` counts the model's operations; pass it to report MFU. `checkpoint_every` is in steps.
    `skipped_steps` is the number of steps that the run skipped before this process.
    """

    def __init__(
        self,
        run: Path,
        config: TelemetryConfig,
        world: World,
        *,
        start_step: int,
        num_steps: int,
        global_batch: int,
        checkpoint_every: int,
        phases: Phases,
        evaluated: int | None = None,
        skipped_steps: int = 0,
        flops: ModelFlops | None = None,
    ) -> None:
        if config.tensorboard:
            check_tensorboard()
        self.run, self.config, self.world = run, config, world
        self.start_step, self.num_steps, self.evaluated = start_step, num_steps, evaluated
        self.global_batch, self.checkpoint_every = global_batch, checkpoint_every
        self.skipped_steps = skipped_steps
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # Both are None without a port.
        self.metrics: Metrics | None = None
        self.endpoint: Endpoint | None = None
        self._phases, self._ranks = phases, Stragglers(world.size)
        self._is_log_written = True
        peak = None
        if flops is not None:
            peak = peak_flops(world.device, flops.precision, config.peak_tflops)
        self._utilization = Utilization(flops, peak, self.print_line)

    def __enter__(self) -> "Telemetry":
        with ExitStack() as stack:
            if self.config.port is not None:  # open this first: its port may be in use
                from trainer.telemetry.prometheus import Endpoint, Metrics

                self.metrics = Metrics(
                    self.world,
                    start_step=self.start_step,
                    num_steps=self.num_steps,
                    global_batch=self.global_batch,
                    restarts=self.restarts,
                    phases=self._phases,
                    checkpoint_every=self.checkpoint_every,
                    skipped_steps=self.skipped_steps,
                )
                self.endpoint = stack.enter_context(
                    closing(Endpoint(self.config, self.world.local_rank, self.metrics.registry))
                )
            if self.world.is_main:
                self._open_files(stack)
            self._opened = stack.pop_all()
        self._pace = Pace(start_step=self.start_step, num_steps=self.num_steps)
        if self.endpoint is not None:
            self._print_address(self.endpoint)
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def print_line(self, line: str) -> None:
        """Print one line on rank 0. It is wrapped at word boundaries only on a terminal."""
        if self.world.is_main:
            self.screen.print_line(line)

    def is_due(self, step: int) -> bool:
        """Return whether `step` (counted from 1) is logged."""
        return step % self.config.log_every == 0 or step in (1, self.num_steps)

    def beat(
        self,
        step: int,
        busy_seconds: Sequence[float] = (),
        inputs: dict[str, Tensor] | None = None,
    ) -> None:
        """Record that `step` is complete.

        `busy_seconds` contains one number per rank, the result of `Phases.take_busy`. `inputs` are
        this rank's inputs, for MFU.
        """
        if self.metrics is not None:
            self.metrics.beat(step)
        if inputs is not None:
            self._utilization.add(inputs)
        if self.world.is_main:
            self.screen.beat(step)
            if len(busy_seconds) > 1:
                self._ranks.add(busy_seconds)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        bad_samples: int,
        skipped_steps: int = 0,
        **more: float,
    ) -> None:
        """Log a completed step for which `is_due` returned true. Rates cover the time since the
        last logged step.

        `bad_samples` and `skipped_steps` are totals for the run so far. `more` is written only to
        the files.
        """
        numbers: dict[str, Any] = {
            "loss": loss,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "bad_samples": bad_samples,
            "skipped_steps": skipped_steps,
            **more,
            **self._rates(step),
            "restarts": self.restarts,
            "memory": memory_bytes(self.world.device),
        }
        if self.metrics is not None:
            self.metrics.beat(step)
            self.metrics.step(numbers)
        if self.world.is_main:
            numbers |= self._busy_ranks()
            samples = step * self.global_batch
            self._record({"event": "step", "step": step, "samples": samples, **numbers})
            self._draw(step, numbers)
            self.screen.step(step, numbers, self._pace.remaining_seconds())

    def committed(self, folders: Sequence[Path]) -> None:
        """Report committed checkpoints."""
        for folder in folders:
            step = step_of(folder)
            assert step is not None, folder
            self.event("checkpoint", step, f"checkpoint {folder}", folder=str(folder))

    def event(self, name: str, step: int, line: str, **numbers: Any) -> None:
        """Report an event at a step."""
        if self.metrics is not None:
            self.metrics.event(name, numbers)
        if self.world.is_main:
            self._record({"event": name, "step": step, **numbers})
            self._draw(step, {name: numbers})
            self.print_line(line)

    def _record(self, record: dict[str, Any]) -> None:
        is_written = self.file.write({"time": round(time.time(), 3), **record})
        if self._is_log_written and not is_written:
            self.print_line(
                f"{self.file.path} cannot be written: lines are buffered until writing succeeds"
            )
        self._is_log_written = is_written

    def _open_files(self, stack: ExitStack) -> None:
        path = self.run / "metrics.jsonl"
        drop_lines_after(path, self.start_step, evaluated=self.evaluated)
        self.file = stack.enter_context(closing(JsonLines(path)))
        self.tensorboard: TensorBoard | None = None
        if self.config.tensorboard:
            folder = self.run / "tensorboard"
            self.tensorboard = stack.enter_context(
                closing(TensorBoard(folder, start_step=self.start_step))
            )
        self.screen = stack.enter_context(
            closing(Screen(start_step=self.start_step, num_steps=self.num_steps))
        )

    def _print_address(self, endpoint: "Endpoint") -> None:
        if self.world.is_main:
            last = (self.config.port or 0) + self.world.local_size - 1
            shared = self.config.port and self.world.local_size > 1
            others = f" (other ranks of this machine: ports up to {last})"
            self.print_line(f"metrics at {endpoint.url}{others if shared else ''}")
        elif not self.config.port:  # each rank uses any free port, which rank 0 does not know
            print(f"metrics of rank {self.world.rank} at {endpoint.url}", flush=True)

    def _busy_ranks(self) -> dict[str, Any]:
        """Return the slowest rank and the busy times. Prints a message if one rank delays the
        others.
        """
        seconds = self._ranks.busy_seconds()
        if not seconds:
            return {}
        if self.metrics is not None:
            self.metrics.busy(seconds, self._ranks.slow_ranks())
        notice = self._ranks.notice()
        if notice is not None:
            self.print_line(notice)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        busy = {"slowest": seconds[slowest], "median": median(seconds)}
        return {"slowest_rank": slowest, "busy_seconds": busy}

    def _rates(self, step: int) -> dict[str, Any]:
        """Return the rates since the last report, excluding the time of evaluations and
        checkpoints.
        """
        phases = self._phases.take()
        excluded = sum(phases.get(phase, 0.0) for phase in OUTSIDE_STEPS)
        elapsed, steps = self._pace.report(step, excluded)
        rates = {
            "step_seconds": elapsed / steps,
            "samples_per_second": steps * self.global_batch / elapsed,
            "data_wait_ratio": phases.get("data", 0.0) / elapsed,
            "phases": phases,
        }
        mfu = self._utilization.take(elapsed)
        return rates if mfu is None else rates | {"mfu": mfu}

    def _draw(self, step: int, numbers: dict[str, Any]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.write(step, numbers)


def check_telemetry(config: TelemetryConfig, world: World) -> None:
    """Raise the errors that opening a `Telemetry` would raise: ValueError for a package that is not
    installed, or OSError for a port that cannot be used.
    """
    if config.tensorboard:
        check_tensorboard()
    if config.port is not None:
        from prometheus_client import CollectorRegistry

        from trainer.telemetry.prometheus import Endpoint

        Endpoint(config, world.local_rank, CollectorRegistry()).close()

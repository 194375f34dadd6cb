"""Reports a run's metrics to JSONL, TensorBoard, a Prometheus endpoint per rank, and the console.

All of these receive the same numbers at the same steps. Only rank 0 prints and writes files, except
for the sample IDs of each rank.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from data.extras import install_command
from data.loading.batch import Batch
from trainer.config import TelemetryConfig
from trainer.faults.stragglers import Stragglers
from trainer.telemetry.jsonl import JsonLines, drop_lines_after
from trainer.telemetry.mfu import ModelFlops, Utilization
from trainer.telemetry.phases import OUTSIDE_STEPS, Phases
from trainer.telemetry.progress import Pace, Screen, memory_bytes
from trainer.world import World

if TYPE_CHECKING:
    from trainer.telemetry.prometheus import Endpoint, Metrics


class Telemetry(AbstractContextManager["Telemetry"]):
    """The reports of one run. Every rank makes the same calls, but ranks other than rank 0 only
    serve their endpoint and log their samples. No method waits for another rank.

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
        self._samples: JsonLines | None = None
        self._tensorboard: Any = None
        self._phases, self._ranks = phases, Stragglers(world.size)
        self._is_log_written = True
        self._utilization = Utilization(
            flops, world.device, config.peak_tflops, print_line=self.print_line
        )

    def __enter__(self) -> "Telemetry":
        with ExitStack() as opened:
            if self.config.port is not None:  # open this first: its port may be in use
                self._open_endpoint(opened)
            if self.config.sample_ids:
                path = self.run / f"samples-rank{self.world.rank}.jsonl"
                self._samples = opened.enter_context(closing(JsonLines(path)))
            if self.world.is_main:
                self._open_files(opened)
            self._opened = opened.pop_all()
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

    def samples(self, step: int, batch: Batch) -> None:
        """Log the sample IDs of this rank's batch, for audits, if the recipe asks for it."""
        if self._samples is not None:
            self._samples.write({"step": step, "samples": batch.indices.tolist()})

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

    def step(self, step: int, **numbers: Any) -> None:
        """Log the `numbers` of a completed step for which `is_due` returned true: the loss, the
        learning rate, the gradient norm, and the totals of bad samples and skipped steps of the run
        so far. Rates cover the time since the last logged step.
        """
        numbers |= {
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

    def _draw(self, step: int, numbers: dict[str, Any], under: str = "") -> None:
        """Write the numbers of a step to TensorBoard. A nested dict becomes a group."""
        if self._tensorboard is None:
            return
        for name, value in numbers.items():
            if isinstance(value, dict):
                self._draw(step, value, f"{name}/")
            elif isinstance(value, int | float):
                self._tensorboard.add_scalar(under + name, value, step)
        self._tensorboard.flush()

    def _open_endpoint(self, opened: ExitStack) -> None:
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
        endpoint = Endpoint(self.config, self.world.local_rank, self.metrics.registry)
        self.endpoint = opened.enter_context(closing(endpoint))

    def _open_files(self, opened: ExitStack) -> None:
        path = self.run / "metrics.jsonl"
        drop_lines_after(path, self.start_step, evaluated=self.evaluated)
        self.file = opened.enter_context(closing(JsonLines(path)))
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports the optional package

            # TensorBoard hides the data that earlier processes wrote for later steps.
            purge = self.start_step + 1 if self.start_step else None
            writer: Any = SummaryWriter(str(self.run / "tensorboard"), purge_step=purge)
            self._tensorboard = opened.enter_context(closing(writer))
        screen = Screen(start_step=self.start_step, num_steps=self.num_steps)
        self.screen = opened.enter_context(closing(screen))

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
        others."""
        seconds = self._ranks.busy_seconds()
        if not seconds:
            return {}
        if self.metrics is not None:
            self.metrics.busy(seconds, self._ranks.slow_ranks())
        if (notice := self._ranks.notice()) is not None:
            self.print_line(notice)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        busy = {"slowest": seconds[slowest], "median": median(seconds)}
        return {"slowest_rank": slowest, "busy_seconds": busy}

    def _rates(self, step: int) -> dict[str, Any]:
        """Return the rates since the last report, excluding the time of evaluations and
        checkpoints."""
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


def check_tensorboard() -> None:
    """Raise ValueError if the optional package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise ValueError(
            "telemetry.tensorboard is true, but the package tensorboard is not installed: run "
            f"{install_command('tensorboard')}, or set telemetry.tensorboard=false"
        )

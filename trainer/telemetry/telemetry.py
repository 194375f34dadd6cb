"""Reports a run's metrics to JSONL, TensorBoard, a Prometheus endpoint per rank, and the console.

All of these receive the same numbers at the same steps. Only rank 0 prints and writes files, except
for the sample IDs of each rank.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from data.loading.batch import Batch
from trainer.config import TelemetryConfig
from trainer.telemetry.jsonl import Event, JsonLines, drop_lines_after
from trainer.telemetry.phases import OUTSIDE_STEPS, Phases
from trainer.telemetry.progress import Pace, Screen, memory_bytes
from trainer.world import World

if TYPE_CHECKING:
    from trainer.telemetry.prometheus import Endpoint, Metrics


class Telemetry(AbstractContextManager["Telemetry"]):
    """The reports of one run. Every rank makes the same calls, but ranks other than rank 0 only
    serve their endpoint and log their samples. No method waits for another rank.

    `checkpoint_every` is in steps. `skipped_steps` is the number of steps that the run skipped
    before this process.
    """

    # Both are None without a port.
    _metrics: "Metrics | None" = None
    endpoint: "Endpoint | None" = None
    _samples: JsonLines | None = None
    _tensorboard: Any = None
    _is_log_written = True

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
    ) -> None:
        self._config, self._world, self._num_steps = config, world, num_steps
        self._global_batch = global_batch
        self._restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._phases, self._busy = phases, list[Sequence[float]]()
        with ExitStack() as opened:
            if config.port is not None:  # open this first: its port may be in use
                from trainer.telemetry.prometheus import Endpoint, Metrics

                self._metrics = Metrics(
                    world,
                    phases,
                    start_step=start_step,
                    global_batch=global_batch,
                    planned_steps=num_steps,
                    checkpoint_every_steps=checkpoint_every,
                    restarts=self._restarts,
                    skipped_steps=skipped_steps,
                )
                endpoint = Endpoint(config, world.local_rank, self._metrics.registry)
                self.endpoint = opened.enter_context(closing(endpoint))
            if config.sample_ids:
                path = run / f"samples-rank{world.rank}.jsonl"
                self._samples = opened.enter_context(closing(JsonLines(path)))
            if world.is_main:
                path = run / "metrics.jsonl"
                drop_lines_after(path, start_step, evaluated=evaluated)
                self._file = opened.enter_context(closing(JsonLines(path)))
                if config.tensorboard:
                    from torch.utils.tensorboard import SummaryWriter  # the optional package

                    # TensorBoard hides the data that earlier processes wrote for later steps.
                    purge = start_step + 1 if start_step else None
                    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=purge)
                    self._tensorboard = opened.enter_context(closing(writer))
                screen = Screen(start_step=start_step, num_steps=num_steps)
                self._screen = opened.enter_context(closing(screen))
            self._opened = opened.pop_all()
        self._pace = Pace(start_step=start_step, num_steps=num_steps)
        if self.endpoint is not None and world.is_main:
            others = f"; local rank r: port {config.port} + r" if config.port else ""
            self.print_line(f"metrics at {self.endpoint.url}{others}")
        elif self.endpoint is not None and not config.port:  # rank 0 does not know this port
            print(f"metrics of rank {world.rank} at {self.endpoint.url}", flush=True)

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def print_line(self, line: str) -> None:
        """Print one line on rank 0. It is wrapped at word boundaries only on a terminal."""
        if self._world.is_main:
            self._screen.print_line(line)

    def is_due(self, step: int) -> bool:
        """Return whether `step` (counted from 1) is logged."""
        return step % self._config.log_every == 0 or step in (1, self._num_steps)

    def samples(self, step: int, batch: Batch) -> None:
        """Log the sample IDs of this rank's batch, for audits, if the recipe asks for it."""
        if self._samples is not None:
            self._samples.write({"step": step, "samples": batch.indices.tolist()})

    def beat(self, step: int, busy_seconds: Sequence[float] = ()) -> None:
        """Record that `step` is complete.

        `busy_seconds` contains one number per rank, the result of `Phases.take_busy`.
        """
        if self._metrics is not None:
            self._metrics.beat(step)
        if self._world.is_main:
            self._screen.beat(step)
            self._busy.append(busy_seconds)

    def step(self, step: int, **numbers: Any) -> None:
        """Log the `numbers` of a completed step for which `is_due` returned true: the loss, the
        learning rate, the gradient norm, and the totals of bad samples and skipped steps of the run
        so far. Rates cover the time since the last logged step.
        """
        numbers |= {
            **self._rates(step),
            "restarts": self._restarts,
            "memory": memory_bytes(self._world.device),
        }
        # The mean of each rank since the last logged step
        busy = [sum(seconds) / len(self._busy) for seconds in zip(*self._busy, strict=True)]
        self._busy.clear()
        if self._metrics is not None:
            self._metrics.beat(step)
            self._metrics.step(numbers, busy)
        if self._world.is_main:
            if len(busy) > 1:
                numbers["slowest_rank"] = max(range(len(busy)), key=busy.__getitem__)
                numbers["busy_seconds"] = {"slowest": max(busy), "median": median(busy)}
            samples = step * self._global_batch
            self._record({"event": "step", "step": step, "samples": samples, **numbers})
            self._draw(step, numbers)
            self._screen.step(step, numbers, self._pace.remaining_seconds())

    def report(self, event: Event) -> None:
        """Report an event."""
        self.event(event.name, event.step, event.line, **event.values)

    def event(self, name: str, step: int, line: str, **numbers: Any) -> None:
        """Report an event at a step."""
        if self._metrics is not None:
            self._metrics.event(name, numbers)
        if self._world.is_main:
            self._record({"event": name, "step": step, **numbers})
            self._draw(step, {name: numbers})
            self.print_line(line)

    def _record(self, record: dict[str, Any]) -> None:
        is_written = self._file.write({"time": round(time.time(), 3), **record})
        if self._is_log_written and not is_written:
            self.print_line(
                f"{self._file.path} cannot be written: lines are buffered until writing succeeds"
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

    def _rates(self, step: int) -> dict[str, Any]:
        """Return the rates since the last report, excluding the time of evaluations and
        checkpoints."""
        phases = self._phases.take()
        excluded = sum(phases.get(phase, 0.0) for phase in OUTSIDE_STEPS)
        elapsed, steps = self._pace.report(step, excluded)
        return {
            "step_seconds": elapsed / steps,
            "samples_per_second": steps * self._global_batch / elapsed,
            "data_wait_ratio": phases.get("data", 0.0) / elapsed,
            "phases": phases,
        }

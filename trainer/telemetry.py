"""Where a run's numbers go: JSONL, a Prometheus endpoint, a bar on a terminal or plain lines.

All are fed from the same numbers at the same steps. Files belong to rank 0.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import fill
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from trainer.config import TelemetryConfig
from trainer.step_log import drop_lines_after
from trainer.world import World


class Telemetry(AbstractContextManager["Telemetry"]):
    """Reports of one run; on every rank but the first each call does nothing."""

    def __init__(
        self,
        run: Path,
        config: TelemetryConfig,
        world: World,
        *,
        start_step: int,
        num_steps: int,
        global_batch: int,
    ) -> None:
        self.active = world.is_main
        self.path, self.config = run / "metrics.jsonl", config
        self.start_step, self.num_steps = start_step, num_steps
        self.global_batch = global_batch

    def __enter__(self) -> "Telemetry":
        if self.active:
            self.metrics = _Metrics(self.config)  # first: a port in use leaves all as it was
            drop_lines_after(self.path, self.start_step)
            self.file = self.path.open("a", encoding="utf-8")
            self.console = Console(
                file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
            )
            self.bar, self.bar_task = self._start_bar()
            self._last_time, self._last_step = time.perf_counter(), self.start_step
            self._waited = 0.0
            if self.metrics.url:
                self.say(f"metrics at {self.metrics.url}")
        return self

    def say(self, line: str) -> None:
        """One line for a person; on a terminal broken between words, in a log never."""
        if self.active:
            if self.bar is not None:
                width = self.console.width
                line = fill(line, width, break_long_words=False, break_on_hyphens=False)
            self.console.print(line)

    def waited(self, seconds: float) -> None:
        """Time that a step spent waiting for its data."""
        if self.active:
            self._waited += seconds

    def is_due(self, step: int) -> bool:
        """Whether the numbers of `step` (counted from 1) are logged."""
        return step % self.config.log_every == 0 or step in (1, self.num_steps)

    def step(self, step: int, **numbers: float) -> None:
        """Report a finished step that `is_due`; rates are since the last report."""
        if not self.active:
            return
        now = time.perf_counter()
        elapsed, steps = max(now - self._last_time, 1e-9), max(step - self._last_step, 1)
        numbers |= {
            "step_seconds": elapsed / steps,
            "samples_per_second": steps * self.global_batch / elapsed,
            "data_wait_ratio": self._waited / elapsed,
        }
        self._last_time, self._last_step, self._waited = now, step, 0.0
        self._write({"event": "step", "step": step, "samples": step * self.global_batch, **numbers})
        self.metrics.step(step, step * self.global_batch, numbers)
        loss = f"loss {numbers['loss']:.4f}"
        speed = (
            f"{numbers['samples_per_second']:.0f} samples/s  "
            f"data wait {100 * numbers['data_wait_ratio']:.0f}%"
        )
        if self.bar is not None:
            self.bar.update(self.bar_task, completed=step, numbers=f"{loss}  {speed}")
        else:
            rate = f"lr {numbers['learning_rate']:.2e}"
            self.say(f"step {step}/{self.num_steps}  {loss}  {rate}  {speed}")

    def event(self, name: str, step: int, line: str, **numbers: Any) -> None:
        """Report something that happened at a step, such as an evaluation or a checkpoint."""
        if self.active:
            self._write({"event": name, "step": step, **numbers})
            self.metrics.event(name, numbers)
            self.say(line)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside does not count as training time."""
        start = time.perf_counter()
        yield
        if self.active:
            self._last_time += time.perf_counter() - start

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.active:
            if self.bar is not None:
                self.bar.stop()
            self.file.close()
            self.metrics.close()

    def _write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")
        self.file.flush()

    def _start_bar(self) -> tuple[Progress | None, TaskID]:
        # FORCE_COLOR makes rich take a file for a terminal.
        if not (sys.stdout.isatty() and self.console.is_interactive):
            return None, TaskID(0)
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),  # what the numbers leave of the line
            TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            expand=True,
        )
        bar.start()
        self.console.show_cursor(True)  # a rank that is killed could not show it again
        return bar, bar.add_task("", total=self.num_steps, completed=self.start_step, numbers="")


class _Metrics:
    """The Prometheus side; names carry base units. Nothing listens where no port is asked for."""

    def __init__(self, config: TelemetryConfig) -> None:
        self.url: str | None = None
        self.server = None
        registry = CollectorRegistry()
        self.steps = Counter("kway_train_steps", "Optimizer steps done", registry=registry)
        self.samples = Counter("kway_train_samples", "Samples consumed", registry=registry)
        self.checkpoints = Counter("kway_train_checkpoints", "Checkpoints", registry=registry)
        self.loss = Gauge("kway_train_loss", "Loss of the last logged step", registry=registry)
        self.rate = Gauge("kway_train_learning_rate", "Learning rate", registry=registry)
        self.norm = Gauge("kway_train_gradient_norm", "Global gradient norm", registry=registry)
        self.seconds = Gauge("kway_train_step_seconds", "Mean step time", registry=registry)
        self.wait = Gauge(
            "kway_train_data_wait_ratio", "Share of the time spent on data", registry=registry
        )
        self.bad = Gauge(
            "kway_train_bad_samples", "Damaged samples met, and replaced", registry=registry
        )
        self.last = Gauge(
            "kway_train_last_step_timestamp_seconds", "Time of the last step", registry=registry
        )
        self.evaluation = Gauge(
            "kway_train_evaluation", "Last evaluation", ["measure"], registry=registry
        )
        self._done = [0, 0]
        if config.port is not None:
            try:
                self.server, _ = start_http_server(config.port, config.host, registry)
            except OSError as error:
                raise OSError(
                    f"telemetry.port {config.port} on {config.host} cannot be used "
                    f"({error.strerror}): choose another, or 0 for any free one"
                ) from error
            host = f"[{config.host}]" if ":" in config.host else config.host
            self.url = f"http://{host}:{self.server.server_port}/metrics"

    def step(self, step: int, samples: int, numbers: dict[str, float]) -> None:
        for counter, value, index in ((self.steps, step, 0), (self.samples, samples, 1)):
            counter.inc(value - self._done[index])
            self._done[index] = value
        self.loss.set(numbers["loss"])
        self.rate.set(numbers["learning_rate"])
        self.norm.set(numbers["gradient_norm"])
        self.seconds.set(numbers["step_seconds"])
        self.wait.set(numbers["data_wait_ratio"])
        self.bad.set(numbers["bad_samples"])
        self.last.set_to_current_time()

    def event(self, name: str, numbers: dict[str, Any]) -> None:
        if name == "checkpoint":
            self.checkpoints.inc()
        if name == "evaluation":
            for measure, value in numbers.items():
                self.evaluation.labels(measure).set(value)

    def close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

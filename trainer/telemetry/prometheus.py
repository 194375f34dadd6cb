"""A rank's Prometheus metrics and the endpoint that serves them. Metric names include base units.

Counters start at 0 in each process, so that `rate` and `increase` are correct across restarts. The
gauge `kway_train_step` is the step of the run. Gauges that have not been set are not exported.
"""

import errno
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, start_http_server

from trainer.config import TelemetryConfig
from trainer.telemetry.phases import PHASES, Phase, Phases
from trainer.world import World

# For each number of a logged step, the metric name and help text.
_STEP_GAUGES = {
    "loss": ("loss", "Loss of the last logged step"),
    "learning_rate": ("learning_rate", "Learning rate of the backbone"),
    "gradient_norm": ("gradient_norm", "Global gradient norm before clipping"),
    "step_seconds": ("step_seconds", "Mean step time since the last logged step"),
    "samples_per_second": ("samples_per_second", "Training throughput over all ranks"),
    "data_wait_ratio": ("data_wait_ratio", "Fraction of time spent waiting for data"),
    "mfu": ("mfu_ratio", "Model operations as a fraction of the peak rate of the device"),
    "bad_samples": ("bad_samples", "Damaged samples that were replaced"),
    "skipped_steps": ("skipped_steps", "Updates skipped because of non-finite numbers"),
    "restarts": ("restarts", "Number of times the launcher restarted the ranks"),
}
_LAST_PORT = 65_535


class Metrics:
    """All metrics of one rank's endpoint."""

    def __init__(
        self,
        world: World,
        *,
        start_step: int,
        num_steps: int,
        global_batch: int,
        restarts: int,
        checkpoint_every: int,
        phases: Phases,
        skipped_steps: int = 0,
    ) -> None:
        """`checkpoint_every` is in steps. `skipped_steps` is the number of steps skipped before
        this process.
        """
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._slow: set[int] = set()
        self._step, self._global_batch = start_step, global_batch
        self._steps = self._counter("steps", "Optimizer steps of this process")
        self._samples = self._counter("samples", "Samples of these steps over all ranks")
        self._checkpoints = self._counter("checkpoints", "Checkpoints written by this process")
        self._lost = self._counter("lost_checkpoints", "Checkpoints that could not be written")
        self._phases = self._counter("phase_seconds", "Time spent by this rank, by phase", "phase")
        for phase in PHASES:
            self._phases.labels(phase)
        self._show_phase(phases)
        self._set("planned_steps", "Planned steps of the run", num_steps)
        self._set("checkpoint_every_steps", "Steps between two checkpoints", checkpoint_every)
        help_text = "Time at which this process started reporting"
        self._gauge("start_timestamp_seconds", help_text).set_to_current_time()
        self._set("restarts", _STEP_GAUGES["restarts"][1], restarts)
        # Set this at startup, because an alert on its increase ignores the first value.
        self._set("skipped_steps", _STEP_GAUGES["skipped_steps"][1], skipped_steps)
        info = Info("kway_train_rank", "Identity of this rank", registry=self.registry)
        info.info(
            {
                "rank": str(world.rank),
                "local_rank": str(world.local_rank),
                "host": socket.gethostname(),
                "version": _version(),
            }
        )
        self.beat(start_step)

    def beat(self, step: int) -> None:
        """Record the heartbeat: `step` is complete, or the run starts from it."""
        self._steps.inc(step - self._step)
        self._samples.inc((step - self._step) * self._global_batch)
        self._step = step
        self._set("step", "Current step of the run", step)
        help_text = "Time of the last step, or of startup before the first step"
        self._gauge("last_step_timestamp_seconds", help_text).set_to_current_time()

    def step(self, numbers: dict[str, Any]) -> None:
        for key, (name, help_text) in _STEP_GAUGES.items():
            if key in numbers:
                self._set(name, help_text, numbers[key])
        for phase, seconds in numbers["phases"].items():
            self._phases.labels(phase).inc(seconds)
        for kind, size in numbers["memory"].items():
            self._set("memory_bytes", "Memory used by this rank, by kind", size, kind=kind)

    def busy(self, seconds: Sequence[float], slow: Mapping[int, float]) -> None:
        """Set the busy seconds of each rank, in rank order, and the ratio of each slow rank's time
        to the time of the other ranks.
        """
        for rank, value in enumerate(seconds):
            help_text = "Median time per step for data, forward and head, without waiting for ranks"
            self._set("rank_busy_seconds", help_text, value, rank=str(rank))
        for rank, ratio in slow.items():
            help_text = (
                "Step time of a slow rank relative to the other ranks; absent for other ranks"
            )
            self._set("slow_rank_ratio", help_text, ratio, rank=str(rank))
        for rank in self._slow - slow.keys():
            self._gauges["slow_rank_ratio"].remove(str(rank))
        self._slow = set(slow)

    def event(self, name: str, numbers: dict[str, Any]) -> None:
        if name == "checkpoint":
            self._checkpoints.inc()
            self._gauge(
                "last_checkpoint_timestamp_seconds", "Time of the last checkpoint"
            ).set_to_current_time()
        if name == "lost_checkpoint":
            self._lost.inc()
        if name == "evaluation":
            for measure, value in numbers.items():
                if isinstance(value, int | float):
                    self._set("evaluation", "Last evaluation by metric", value, measure=measure)

    def _show_phase(self, phases: Phases) -> None:
        """Export this rank's phase. It is read at each scrape, so that a long evaluation is not
        mistaken for a stalled step.
        """
        gauge = self._gauge("phase", "1 for the current phase of this rank", "phase")
        for phase in PHASES:
            gauge.labels(phase).set_function(partial(_is_in, phase, phases))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kway_train_{name}", help_text, labels, registry=self.registry)

    def _set(self, name: str, help_text: str, value: float, **labels: str) -> None:
        gauge = self._gauge(name, help_text, *labels)
        (gauge.labels(**labels) if labels else gauge).set(value)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                f"kway_train_{name}", help_text, labels, registry=self.registry
            )
        return self._gauges[name]


def _is_in(phase: Phase, phases: Phases) -> bool:
    return phases.counted == phase


class Endpoint:
    """Serves a registry at `url` until it is closed."""

    def __init__(
        self, config: TelemetryConfig, local_rank: int, registry: CollectorRegistry
    ) -> None:
        """Raises OSError if the port cannot be used, or ValueError if it is too large."""
        assert config.port is not None
        port = config.port + local_rank if config.port else 0
        if port > _LAST_PORT:
            raise ValueError(
                f"telemetry.port {config.port} + local rank {local_rank} is {port}, more than "
                f"{_LAST_PORT}: choose a lower port"
            )
        of_rank = f" (local rank {local_rank})" if local_rank else ""
        try:
            self._server, self._thread = start_http_server(port, config.host, registry)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise OSError(
                    f"telemetry.host is {config.host}, which is not an address of this machine "
                    f"({error.strerror}): use 127.0.0.1, another address of this machine, or "
                    "0.0.0.0 for all addresses"
                ) from error
            raise OSError(
                f"telemetry.port {port}{of_rank} on {config.host} cannot be used "
                f"({error.strerror}): choose another port, or 0 for any free port"
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.port = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _version() -> str:
    """Return the version of kway, or `source` if kway is not installed."""
    try:
        return version("kway")
    except PackageNotFoundError:
        return "source"

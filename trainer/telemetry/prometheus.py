"""A rank's Prometheus metrics and the endpoint that serves them. Metric names include base units.

Counters start at 0 in each process, so that `rate` and `increase` are correct across restarts. The
gauge `kway_train_step` is the step of the run. Gauges that have not been set are not exported.
"""

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, start_http_server

from trainer.config import TelemetryConfig
from trainer.telemetry.phases import PHASES, Phase, Phases
from trainer.world import World

# The help text of each gauge and, if it has one, its label. A gauge with the name of a number of a
# logged step shows that number.
GAUGES: dict[str, tuple[str, ...]] = {
    "step": ("Current step of the run",),
    "planned_steps": ("Planned steps of the run",),
    "start_timestamp_seconds": ("Time at which this process started reporting",),
    "last_step_timestamp_seconds": ("Time of the last step, or of startup before the first step",),
    "last_checkpoint_timestamp_seconds": ("Time of the last checkpoint",),
    "checkpoint_every_steps": ("Steps between two checkpoints",),
    "loss": ("Loss of the last logged step",),
    "learning_rate": ("Learning rate of the backbone",),
    "gradient_norm": ("Global gradient norm before clipping",),
    "step_seconds": ("Mean step time since the last logged step",),
    "samples_per_second": ("Training throughput over all ranks",),
    "data_wait_ratio": ("Fraction of time spent waiting for data",),
    "bad_samples": ("Damaged samples that were replaced",),
    "skipped_steps": ("Updates skipped because of non-finite numbers",),
    "restarts": ("Number of times the launcher restarted the ranks",),
    "memory_bytes": ("Memory used by this rank, by kind", "kind"),
    "phase": ("1 for the current phase of this rank", "phase"),
    "rank_busy_seconds": (
        "Mean time per step for data, forward and head, without waiting for ranks",
        "rank",
    ),
    "evaluation": ("Last evaluation by metric", "measure"),
}


class Metrics:
    """All metrics of one rank's endpoint."""

    def __init__(
        self, world: World, phases: Phases, *, start_step: int, global_batch: int, **known: float
    ) -> None:
        """`known` are gauges to set at startup. They include `skipped_steps`, because an alert on
        its increase ignores the first value.
        """
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._step, self._global_batch = start_step, global_batch
        self._steps = self._counter("steps", "Optimizer steps of this process")
        self._samples = self._counter("samples", "Samples of these steps over all ranks")
        self._checkpoints = self._counter("checkpoints", "Checkpoints written by this process")
        self._lost = self._counter("lost_checkpoints", "Checkpoints that could not be written")
        self._phases = self._counter("phase_seconds", "Time spent by this rank, by phase", "phase")
        for phase in PHASES:
            self._phases.labels(phase)
            # Read at each scrape, so that a long evaluation is not mistaken for a stalled step.
            self._gauge("phase", phase).set_function(partial(_is_in, phase, phases))
        for name, value in known.items():
            self._gauge(name).set(value)
        self._gauge("start_timestamp_seconds").set_to_current_time()
        info = Info("kway_train_rank", "Identity of this rank", registry=self.registry)
        names = {"rank": str(world.rank), "local_rank": str(world.local_rank)}
        info.info(names | {"host": socket.gethostname()})
        self.beat(start_step)

    def beat(self, step: int) -> None:
        """Record the heartbeat: `step` is complete, or the run starts from it."""
        self._steps.inc(step - self._step)
        self._samples.inc((step - self._step) * self._global_batch)
        self._step = step
        self._gauge("step").set(step)
        self._gauge("last_step_timestamp_seconds").set_to_current_time()

    def step(self, numbers: dict[str, Any], busy_seconds: Sequence[float] = ()) -> None:
        """Set the numbers of a logged step. `busy_seconds` contains one number per rank."""
        for name in GAUGES.keys() & numbers.keys():
            self._gauge(name).set(numbers[name])
        for phase, seconds in numbers["phases"].items():
            self._phases.labels(phase).inc(seconds)
        for kind, size in numbers["memory"].items():
            self._gauge("memory_bytes", kind).set(size)
        for rank, seconds in enumerate(busy_seconds):
            self._gauge("rank_busy_seconds", str(rank)).set(seconds)

    def event(self, name: str, numbers: dict[str, Any]) -> None:
        if name == "checkpoint":
            self._checkpoints.inc()
            self._gauge("last_checkpoint_timestamp_seconds").set_to_current_time()
        if name == "lost_checkpoint":
            self._lost.inc()
        if name == "evaluation":
            for measure, value in numbers.items():
                if isinstance(value, int | float):
                    self._gauge("evaluation", measure).set(value)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kway_train_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, *values: str) -> Gauge:
        """Return a gauge of the table, or its child for the value of its label."""
        if name not in self._gauges:
            help_text, *labels = GAUGES[name]
            self._gauges[name] = Gauge(
                f"kway_train_{name}", help_text, labels, registry=self.registry
            )
        gauge = self._gauges[name]
        return gauge.labels(*values) if values else gauge


def _is_in(phase: Phase, phases: Phases) -> bool:
    return phases.current == phase


class Endpoint:
    """Serves a registry at `url` until it is closed. Raises OSError if the port cannot be used."""

    def __init__(
        self, config: TelemetryConfig, local_rank: int, registry: CollectorRegistry
    ) -> None:
        assert config.port is not None
        port = config.port + local_rank if config.port else 0
        try:
            self._server, self._thread = start_http_server(port, config.host, registry)
        except (OSError, OverflowError) as error:
            of_rank = f" (local rank {local_rank})" if local_rank else ""
            raise OSError(
                f"telemetry.port {port}{of_rank} on telemetry.host {config.host} cannot be used "
                f"({getattr(error, 'strerror', error)}): choose another port, or 0 for any free "
                "port, and an address of this machine, or 0.0.0.0 for all addresses"
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.port = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

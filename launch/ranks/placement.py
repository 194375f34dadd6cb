"""Number and location of a run's ranks, and the rendezvous of their launchers.

The fields have the names and meanings of torchrun's options. Does not import torch.
"""

import difflib
import os
import uuid
from dataclasses import dataclass, field

# Enough for one step and a complete checkpoint. No cloud provider gives more notice before it
# reclaims a machine. If the grace period is shorter, such as Kubernetes' default of 30 s, the
# launcher and its ranks are killed after the grace period instead.
SHUTDOWN_SECONDS = 120

# The keys that torch 2.13 reads in c10d_rendezvous_backend.py and dynamic_rendezvous.py. torch
# silently ignores all others.
_CONF = (
    "is_host",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)
_TRUTHS = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
LAST_PORT = 65_535


@dataclass(frozen=True)
class Placement:
    """The number of ranks per machine, and the minimum and maximum number of machines.

    Raises ValueError for inconsistent fields.
    """

    num_processes: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29500
    max_restarts: int = 0
    shutdown_seconds: int = SHUTDOWN_SECONDS

    def __post_init__(self) -> None:
        self._check_nodes()
        self._check_port()
        self._check_static()

    def _check_nodes(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            if self.min_nodes == self.max_nodes:
                raise ValueError(f"--nnodes is {self.max_nodes}: pass 1 or more")
            raise ValueError(
                f"--nnodes is {self.min_nodes}:{self.max_nodes}: pass MIN:MAX with 1 <= MIN <= MAX"
            )
        if self.max_nodes > 1 and not (self.rdzv_endpoint or self.master_addr):
            raise ValueError(
                f"--nnodes is {self.max_nodes}, but no rendezvous is configured: pass "
                "--rdzv-endpoint HOST:PORT, with the same value on all machines"
            )

    def _check_port(self) -> None:
        if not 1 <= self.master_port <= LAST_PORT:
            raise ValueError(f"--master-port is {self.master_port}: pass 1 to {LAST_PORT}")

    def _check_static(self) -> None:
        if self.master_addr is None:
            if self.node_rank is not None:
                raise ValueError(
                    "--node-rank requires --master-addr: omit --node-rank, because --rdzv-endpoint "
                    "assigns ranks"
                )
            return
        if self.rdzv_endpoint is not None:
            raise ValueError("--master-addr and --rdzv-endpoint are mutually exclusive: pass one")
        if self.min_nodes != self.max_nodes or self.max_restarts:
            raise ValueError(
                "--master-addr supports neither --max-restarts nor --nnodes MIN:MAX: pass "
                "--rdzv-endpoint HOST:PORT instead"
            )
        if not 0 <= (self.node_rank or 0) < self.max_nodes:
            raise ValueError(f"--node-rank is {self.node_rank}: pass 0 to {self.max_nodes - 1}")

    @property
    def is_static(self) -> bool:
        return self.master_addr is not None

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the rendezvous. On a single machine, port 0 selects a free port."""
        if self.master_addr is not None:
            return f"{self.master_addr}:{self.master_port}"
        return self.rdzv_endpoint or "localhost:0"

    @property
    def run_id(self) -> str:
        if self.rdzv_id is not None:
            return self.rdzv_id
        return "kway" if self.rdzv_endpoint or self.is_static else uuid.uuid4().hex

    @property
    def world_size(self) -> str:
        """The value of `python -m trainer --world-size`: `8` or, if elastic, `4:8`."""
        least, most = (count * self.num_processes for count in (self.min_nodes, self.max_nodes))
        return str(most) if least == most else f"{least}:{most}"

    @property
    def trainer_options(self) -> list[str]:
        """The options of `python -m trainer` that describe its launcher, which is this process."""
        return ["--world-size", self.world_size, "--launcher", str(os.getpid())]


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse `2` -> (2, 2), `1:4` -> (1, 4)."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else True)):
        raise ValueError(f"--nnodes is {text}: pass a number of machines, or MIN:MAX")
    return int(least), int(most if colon else least)


def parse_conf(text: str) -> dict[str, str]:
    """Parse `is_host=1,join_timeout=60` into a mapping."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ValueError(f"--rdzv-conf is {text}: pass key=value[,key=value…]")
    return {_known(key.strip()): _checked(key.strip(), value.strip()) for key, _, value in pairs}


def _known(key: str) -> str:
    if key == "timeout":  # the name of this setting in torch's static rendezvous
        return "join_timeout"
    if key not in _CONF:
        near = difflib.get_close_matches(key, _CONF, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(_CONF)}"
        raise ValueError(f"--rdzv-conf {key} is not a known key: {hint}")
    return key


def _checked(key: str, value: str) -> str:
    if key == "is_host":
        if value.lower() not in _TRUTHS:
            raise ValueError(f"--rdzv-conf {key} is {value}: pass 0 or 1")
    elif not (value.isdecimal() and int(value)):
        raise ValueError(f"--rdzv-conf {key} is {value}: pass an integer of at least 1")
    return value

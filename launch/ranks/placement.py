"""Number and location of a run's ranks, and the rendezvous of their launchers.

The fields have the names and meanings of torchrun's options and define those of `kway train`. Does
not import torch.
"""

import os
import uuid
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from data.option import Option, Supplied

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


def parse_conf(given: str | Mapping[str, str]) -> dict[str, str]:
    """Parse `is_host=1,join_timeout=60`, or a mapping, and check the keys and values."""
    if isinstance(given, str):
        given = {key: value for key, _, value in (p.partition("=") for p in given.split(",") if p)}
    conf = {}
    for key, value in ((key.strip(), value.strip()) for key, value in given.items()):
        if key not in _CONF:
            raise ValueError(f"{key} is not a known key: choose one of {', '.join(_CONF)}")
        least = 0 if key == "is_host" else 1
        if not (value.isdecimal() and int(value) >= least):
            raise ValueError(f"{key} is {value!r}: pass an integer of at least {least}")
        conf[key] = value
    return conf


@dataclass(frozen=True)
class Placement:
    """The number of ranks per machine, and the minimum and maximum number of machines.

    Raises ValueError for inconsistent fields.
    """

    num_processes: Annotated[int, Supplied()] = 1
    min_nodes: Annotated[int, Supplied()] = 1
    max_nodes: Annotated[int, Supplied()] = 1
    rdzv_endpoint: Annotated[str | None, Option(metavar="HOST:PORT")] = Field(
        default=None, description="address of the rendezvous of several machines"
    )
    rdzv_id: str | None = Field(default=None, description="name of the run in the rendezvous")
    rdzv_conf: Annotated[
        dict[str, str], BeforeValidator(parse_conf), Option(metavar="KEY=VALUE,…", type=str)
    ] = Field(
        default_factory=dict, description="is_host=0|1, join_timeout=S, last_call_timeout=S, …"
    )
    local_addr: str | None = Field(default=None, description="address of this machine")
    node_rank: int | None = Field(
        default=None, ge=0, description="rank of this machine (used with --master-addr)"
    )
    master_addr: str | None = Field(
        default=None, description="host of a static rendezvous, which does not support restarts"
    )
    master_port: int = Field(default=29500, ge=1, le=65_535, description="port of --master-addr")
    max_restarts: int = Field(
        default=0, ge=0, description="maximum number of restarts after a retryable failure"
    )
    # Enough for one step and a complete checkpoint. No cloud provider gives more notice before it
    # reclaims a machine. If the grace period is shorter, such as Kubernetes' default of 30 s, the
    # launcher and its ranks are killed after the grace period instead.
    shutdown_timeout: int = Field(
        default=120, ge=0, description="time in seconds for the ranks to save after a stop signal"
    )

    @model_validator(mode="after")
    def _check(self) -> "Placement":
        least, most = self.min_nodes, self.max_nodes
        nodes = f"{most}" if least == most else f"{least}:{most}"
        if not 1 <= least <= most:
            fix = "1 or more" if least == most else "MIN:MAX with 1 <= MIN <= MAX"
            raise ValueError(f"--nnodes is {nodes}: pass {fix}")
        if most > 1 and not (self.rdzv_endpoint or self.master_addr):
            raise ValueError(
                f"--nnodes is {nodes}, but no rendezvous is configured: pass --rdzv-endpoint "
                "HOST:PORT, with the same value on all machines"
            )
        if self.master_addr is None:
            if self.node_rank is not None:
                raise ValueError(
                    "--node-rank requires --master-addr: omit --node-rank, because --rdzv-endpoint "
                    "assigns ranks"
                )
        elif self.rdzv_endpoint is not None:
            raise ValueError("--master-addr and --rdzv-endpoint are mutually exclusive: pass one")
        elif least != most or self.max_restarts:
            raise ValueError(
                "--master-addr supports neither --max-restarts nor --nnodes MIN:MAX: pass "
                "--rdzv-endpoint HOST:PORT instead"
            )
        elif (self.node_rank or 0) >= most:
            raise ValueError(f"--node-rank is {self.node_rank}: pass 0 to {most - 1}")
        return self

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


def contradicting_variables(placement: Placement, environment: Mapping[str, str]) -> list[str]:
    """Return `PET_NNODES=4` for each variable of torchrun, which kway does not read, that differs
    from the placement."""
    least, most = placement.min_nodes, placement.max_nodes
    values = {
        "NNODES": most if least == most else f"{least}:{most}",
        "NPROC_PER_NODE": placement.num_processes,
        "NODE_RANK": placement.node_rank,
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": placement.master_port if placement.is_static else None,
        "RDZV_ENDPOINT": placement.rdzv_endpoint,
        "MAX_RESTARTS": placement.max_restarts,
    }
    given = {name: environment.get(f"PET_{name}") for name in values}
    automatic = (None, "", "auto", "gpu", "cpu")
    return [
        f"PET_{name}={given[name]}"
        for name, value in values.items()
        if given[name] not in (*automatic, str(value))
    ]

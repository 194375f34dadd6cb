"""Where a run's ranks are and how their launchers find each other. Free of torch.

The names and meanings are torchrun's.
"""

import os
import uuid
from dataclasses import dataclass, field

# A step and a whole checkpoint have to fit: the most that clouds give before they pull the plug.
# Who gives less, as Kubernetes' 30 s, kills the launcher and with it the ranks all the same.
SHUTDOWN_SECONDS = 120


@dataclass(frozen=True)
class Placement:
    """`num_processes` ranks on each of `min_nodes` to `max_nodes` machines; this is one of them.

    Raises ValueError for what does not go together.
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
        self._check_static()

    def _check_nodes(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"--nnodes is {self.min_nodes}:{self.max_nodes}: give 1 <= MIN <= MAX machines"
            )
        if self.max_nodes > 1 and not (self.rdzv_endpoint or self.master_addr):
            raise ValueError(
                f"--nnodes is {self.max_nodes} and no machine is named for them to meet at: give "
                "--rdzv-endpoint HOST:PORT, the same on all of them"
            )

    def _check_static(self) -> None:
        if self.master_addr is None:
            if self.node_rank is not None:
                raise ValueError(
                    "--node-rank goes with --master-addr; under --rdzv-endpoint ranks are found"
                )
            return
        if self.rdzv_endpoint is not None:
            raise ValueError("--master-addr and --rdzv-endpoint are two ways to meet: give one")
        if self.min_nodes != self.max_nodes or self.max_restarts:
            raise ValueError(
                "--master-addr fixes every rank once: for --max-restarts or --nnodes MIN:MAX give "
                "--rdzv-endpoint HOST:PORT instead"
            )
        if not 0 <= (self.node_rank or 0) < self.max_nodes:
            raise ValueError(f"--node-rank is {self.node_rank}: give 0 to {self.max_nodes - 1}")

    @property
    def is_static(self) -> bool:
        return self.master_addr is not None

    @property
    def endpoint(self) -> str:
        """HOST:PORT where the launchers meet; port 0 is any, where there is but one."""
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
        """As `python -m trainer --world-size` takes it."""
        least, most = (count * self.num_processes for count in (self.min_nodes, self.max_nodes))
        return str(most) if least == most else f"{least}:{most}"

    @property
    def trainer_options(self) -> list[str]:
        """What `python -m trainer` is told of its launcher, this process."""
        return ["--world-size", self.world_size, "--launcher", str(os.getpid())]


def parse_nodes(text: str) -> tuple[int, int]:
    """`2` -> (2, 2), `1:4` -> (1, 4)."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else True)):
        raise ValueError(f"--nnodes is {text}: give a number of machines, or MIN:MAX")
    return int(least), int(most if colon else least)


def parse_conf(text: str) -> dict[str, str]:
    """`is_host=1,join_timeout=60` -> its keys and values."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ValueError(f"--rdzv-conf is {text}: give key=value[,key=value…]")
    return {key.strip(): value.strip() for key, _, value in pairs}

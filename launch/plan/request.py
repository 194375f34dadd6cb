"""The inputs of a plan in addition to the recipe."""

from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True)
class PlanRequest:
    """The cluster of a plan. The fields define options of `kway plan`."""

    nodes: int = Field(1, ge=1, description="number of machines")
    gpus: int = Field(1, ge=1, description="GPUs per machine, with one rank per GPU")
    gpu: str = Field(
        "h100", description="GPU model: h100, h200, a100, …; cpu: the CPU of this machine"
    )
    classes: int | None = Field(
        None, ge=2, description="number of classes; default: taken from the shards"
    )
    link_gbps: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="bandwidth from a GPU to other machines, in Gbit/s; default: depends on --gpu",
    )
    storage_gbps: float = Field(
        10,
        gt=0,
        allow_inf_nan=False,
        description="bandwidth from a machine to the storage of checkpoints, in Gbit/s",
    )
    mtbf: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="mean time between failures of a machine, in hours; the plan then contains the "
        "best interval between checkpoints",
    )

"""The model configuration extension of the protocol, and the index of the served models.

Fields have the names of Triton's messages `ModelConfig` and `RepositoryIndexResponse.ModelIndex`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from serving.config import ServingConfig

if TYPE_CHECKING:
    from serving.inference.tensors import Tensor

PLATFORM = "pytorch"
_DATA_TYPES = {
    "BYTES": "TYPE_STRING",
    "INT64": "TYPE_INT64",
    "FP32": "TYPE_FP32",
    "BOOL": "TYPE_BOOL",
}


class ConfigTensor(BaseModel):
    """An input or output. A dimension of -1 is variable."""

    name: str
    data_type: str
    dims: list[int]


class InstanceGroup(BaseModel):
    """The replicas. `count` is their maximum number."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: int


class DynamicBatching(BaseModel):
    """Batching across requests."""

    max_queue_delay_microseconds: int


class ModelConfig(BaseModel):
    """Configuration of a model."""

    name: str
    platform: str
    backend: str
    max_batch_size: int = Field(
        description="always 0: the first dimensions of the inputs are independent of each other"
    )
    input: list[ConfigTensor]
    output: list[ConfigTensor]
    instance_group: list[InstanceGroup]
    dynamic_batching: DynamicBatching


class ModelIndex(BaseModel):
    """An entry of the repository index."""

    name: str
    version: str = ""
    state: Literal["READY", "UNAVAILABLE"]
    reason: str = ""


def model_config(
    name: str, config: ServingConfig, inputs: "Sequence[Tensor]", outputs: "Sequence[Tensor]"
) -> ModelConfig:
    """Return the configuration of a model that is served with `config`."""
    kind: Literal["KIND_CPU", "KIND_GPU"] = "KIND_GPU" if config.device == "cuda" else "KIND_CPU"
    return ModelConfig(
        name=name,
        platform=PLATFORM,
        backend="kway",
        max_batch_size=0,
        input=[_described(one) for one in inputs],
        output=[_described(one) for one in outputs],
        instance_group=[InstanceGroup(name=name, kind=kind, count=config.replica_limit)],
        dynamic_batching=DynamicBatching(
            max_queue_delay_microseconds=round(1e6 * config.batch_wait_seconds)
        ),
    )


def _described(tensor: "Tensor") -> ConfigTensor:
    return ConfigTensor(
        name=tensor.name, data_type=_DATA_TYPES[tensor.datatype], dims=list(tensor.shape)
    )

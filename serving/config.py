"""Server configuration: address, model execution and limits.

This module does not import torch or Ray.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from data.option import Option
from serving.schemas import Required

# Safe in URLs without escaping.
GALLERY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
GalleryName = Annotated[str, StringConstraints(pattern=GALLERY_NAME)]
# The names of a server that listens only on loopback.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MIB = 2**20


class ServingConfig(BaseModel):
    """Configuration of a server. Each limit applies per replica or per request. One client can use
    at most three quarters of `max_requests`, `max_uploads` and `max_upload_bytes` of a replica.

    Fields annotated with `Option` are options of `kway serve`; the others can be set in the config
    file of a Ray cluster (`kway serve --print-config`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[str, Option()] = Field(
        "127.0.0.1", description="address to listen on (0.0.0.0 for all network interfaces)"
    )
    port: Annotated[int, Option()] = Field(
        8000, ge=0, le=65535, description="port to listen on (0 for any free port)"
    )
    grpc_port: Annotated[int | None, Option()] = Field(
        None,
        ge=0,
        le=65535,
        description="port for the Open Inference Protocol over gRPC (0 for any free port); "
        "gRPC is disabled by default",
    )
    replicas: int = Field(
        1,
        gt=0,
        description="number of replicas (processes, each with its own copy of the model)",
    )
    device: Annotated[Literal["cpu", "cuda"], Option()] = Field(
        "cpu", description="device to run the model on; cuda uses one GPU per replica"
    )
    threads: Annotated[int | None, Option()] = Field(
        None,
        gt=0,
        description="number of compute threads per replica (default: number of CPU cores "
        "divided by replicas)",
    )
    max_body_bytes: Annotated[int, Option("--max-body-mib", unit=_MIB)] = Field(
        32 * _MIB, gt=0, le=4096 * _MIB, description="maximum size of a request body in MiB"
    )
    max_inputs: Annotated[int, Option()] = Field(
        64, gt=0, description="maximum number of images or texts per request"
    )
    max_classes: int = Field(100, gt=0, description="maximum number of classes per request")
    max_text_chars: Annotated[int, Option()] = Field(
        10_000, gt=0, description="maximum length of a text in characters"
    )
    max_pixels: int = Field(
        50_000_000, gt=0, description="maximum number of pixels (width x height) of an image"
    )
    batch_size: Annotated[int, Option()] = Field(
        32, gt=0, description="maximum number of texts or image crops per forward pass"
    )
    batch_wait_seconds: Annotated[float, Option("--batch-wait")] = Field(
        0.0,
        ge=0,
        le=3600,
        description="time in seconds that an idle replica waits for a batch to fill",
    )
    max_queued_inputs: int = Field(
        256, gt=0, description="maximum number of inputs waiting for the model"
    )
    max_requests: Annotated[int, Option()] = Field(
        128,
        gt=0,
        description="maximum number of fully received requests in progress per replica; "
        "further requests are rejected with status 429",
    )
    max_uploads: int = Field(
        512,
        gt=0,
        description="maximum number of concurrent uploads per replica; further "
        "uploads are rejected with status 429",
    )
    max_upload_bytes: int = Field(
        2**29,
        gt=0,
        description="maximum total size of concurrent uploads per replica; raised to twice "
        "`max_body_bytes` if it is smaller",
    )
    request_timeout_seconds: Annotated[float, Option("--timeout")] = Field(
        30.0, gt=0, le=3600, description="time limit for a request in seconds, including the upload"
    )
    token_file: Annotated[Path | None, Option()] = Field(
        None,
        description="file with one token per line; clients must send one of the tokens "
        "(default: no authentication)",
    )
    require: Annotated[Required | None, Option()] = Field(
        None,
        description="guaranteed: no verdict on a class whose threshold for the recall of a query "
        "is not guaranteed",
    )
    thresholds: Annotated[Path | None, Option(metavar="FILE")] = Field(
        None,
        description="CSV file with the columns class and threshold, which replace the thresholds "
        "of the bundle for every recall; read again when it changes",
    )
    galleries: Annotated[dict[GalleryName, Path], Option("--gallery", metavar="NAME=FOLDER")] = (
        Field(
            {},
            description="gallery built by `kway index` and the name to serve it under; can "
            "be repeated",
        )
    )
    max_replicas: int | None = Field(
        None,
        gt=0,
        description="maximum number of replicas for autoscaling (default: autoscaling is disabled)",
    )
    target_requests: int = Field(
        16, gt=0, description="target number of requests in progress per replica for autoscaling"
    )
    high_throughput: Annotated[bool, Option()] = Field(
        False,
        description="with Ray: let HAProxy send requests directly to the replicas; some of its "
        "ports are open on all network interfaces (docs/serving.md)",
    )
    allow_imports: tuple[str, ...] = Field(
        (),
        description="backbones, as module:Class, that may be imported if the bundle does "
        "not contain their code",
    )

    @field_validator("token_file", "thresholds", "galleries")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        """Make paths absolute, because each replica has its own working directory."""
        if isinstance(value, dict):
            return {name: path.absolute() for name, path in value.items()}
        return None if value is None else value.absolute()

    @model_validator(mode="after")
    def _check_ports_differ(self) -> Self:
        if self.grpc_port and self.grpc_port == self.port:
            raise ValueError(f"--port and --grpc-port are both {self.port}. Use different ports")
        return self

    @property
    def threads_per_replica(self) -> int:
        """Threads per replica."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.replica_limit)

    @property
    def replica_limit(self) -> int:
        """Upper limit on the number of replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas

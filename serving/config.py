"""Address and limits of a server: the options of `kway serve`. Does not import torch or Ray."""

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

# Safe in URLs without escaping.
GALLERY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
GalleryName = Annotated[str, StringConstraints(pattern=GALLERY_NAME)]
_MIB = 2**20


class ServingConfig(BaseModel):
    """One server. Every limit is for one replica or one request; none is unbounded.

    Fields marked as `Option` are options of `kway serve`; the others can be set in the config file
    of a Ray cluster (`kway serve --print-config`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[str, Option()] = Field(
        "127.0.0.1", description="address to listen on; 0.0.0.0: all addresses of this machine"
    )
    port: Annotated[int, Option()] = Field(
        8000, ge=0, le=65535, description="port to listen on; 0: any free one"
    )
    grpc_port: Annotated[int | None, Option()] = Field(
        None,
        ge=0,
        le=65535,
        description="port of the Open Inference Protocol over gRPC, 0: any free one; default: no "
        "gRPC",
    )
    replicas: int = Field(1, gt=0, description="processes that each hold the model")
    device: Annotated[Literal["cpu", "cuda"], Option()] = Field(
        "cpu", description="cuda: each replica has its own GPU"
    )
    threads: Annotated[int | None, Option()] = Field(
        None,
        gt=0,
        description="threads that a replica computes with; default: the cores over the replicas",
    )
    max_body_bytes: Annotated[int, Option("--max-body-mib", unit=_MIB)] = Field(
        32 * _MIB, gt=0, le=4096 * _MIB, description="most MiB of one request's body"
    )
    max_inputs: Annotated[int, Option()] = Field(
        64, gt=0, description="most images or texts in one request"
    )
    max_classes: int = Field(100, gt=0, description="classes in one request")
    max_text_chars: Annotated[int, Option()] = Field(
        10_000, gt=0, description="most characters of one text"
    )
    max_pixels: int = Field(50_000_000, gt=0, description="width x height of one image")
    batch_size: Annotated[int, Option()] = Field(
        32, gt=0, description="most texts, or crops of images, in one forward pass"
    )
    batch_wait_seconds: Annotated[float, Option("--batch-wait")] = Field(
        0.0, ge=0, le=3600, description="seconds that an idle replica waits for a batch to fill"
    )
    max_queued_inputs: int = Field(256, gt=0, description="inputs that wait for the model")
    max_requests: Annotated[int, Option()] = Field(
        128,
        gt=0,
        description="requests with complete bodies that a replica works on; beyond it: 429",
    )
    max_uploads: int = Field(
        512, gt=0, description="bodies still arriving at one replica; beyond it: 429"
    )
    max_uploads_per_client: int = Field(256, gt=0, description="the same for one client")
    max_upload_bytes: int = Field(
        2**29, gt=0, description="bytes held by uploads; one of `max_body_bytes` always fits"
    )
    max_upload_bytes_per_client: int = Field(2**28, gt=0, description="the same for one client")
    upload_grace_seconds: float = Field(
        7.0, gt=0, description="time before the minimum rate of a body applies"
    )
    min_upload_bytes_per_second: int = Field(
        8192, gt=0, description="minimum rate of a body after the grace period; slower: 408"
    )
    request_timeout_seconds: Annotated[float, Option("--timeout")] = Field(
        30.0, gt=0, le=3600, description="seconds that one request may take, sending it included"
    )
    token_file: Annotated[Path | None, Option()] = Field(
        None,
        description="file of tokens, one a line: clients must send one; default: all are let in",
    )
    max_streams: int = Field(8, gt=0, description="streams of lines at once; beyond it: 429")
    max_streams_per_client: int = Field(4, gt=0, description="of them, one client's")
    max_lines_in_flight: int = Field(16, gt=0, description="of one stream, with the model")
    stream_idle_seconds: float = Field(
        60.0, gt=0, description="a stream without a line for so long is ended"
    )
    galleries: Annotated[dict[GalleryName, Path], Option("--gallery", metavar="NAME=FOLDER")] = (
        Field({}, description="a gallery of `kway index`, and the name to search it by; repeatable")
    )
    max_watches: int = Field(1000, gt=0, description="watches of all clients together")
    max_watches_per_client: int = Field(100, gt=0)
    min_watch_ttl_seconds: float = Field(10.0, gt=0)
    max_watch_ttl_seconds: float = Field(7 * 86400.0, gt=0)
    max_watch_listeners: int = Field(10, gt=0, description="that listen to one watch")
    max_listeners_per_client: int = Field(
        40, gt=0, description="that listen to all watches of one client"
    )
    max_listeners: int = Field(64, gt=0, description="that listen at one replica; beyond it: 429")
    max_listener_hits: int = Field(1000, gt=0, description="that wait for one listener")
    max_feeds: int = Field(32, gt=0, description="feeds that send to one replica; beyond it: 429")
    max_feeds_per_client: int = Field(16, gt=0, description="of them, one client's")
    max_frames_in_flight: int = Field(4, gt=0, description="of one feed, with the model")
    max_frame_bytes: int = Field(
        4 * 2**20,
        gt=0,
        le=12 * 2**20,  # a WebSocket message contains one frame, base64-encoded
        description="of one frame's image or text",
    )
    feed_idle_seconds: float = Field(
        60.0, gt=0, description="a feed without a frame for so long is ended"
    )
    max_replicas: int | None = Field(
        None, gt=0, description="as many while there is work; none: always `replicas`"
    )
    target_requests: int = Field(
        16, gt=0, description="in progress a replica, that the number of replicas is scaled for"
    )
    allow_imports: tuple[str, ...] = Field(
        (), description="module:Class of backbones whose code is not in the bundle"
    )

    @field_validator("token_file", "galleries")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        """Make paths absolute, because each replica has its own working directory."""
        if isinstance(value, dict):
            return {name: path.absolute() for name, path in value.items()}
        return None if value is None else value.absolute()

    @model_validator(mode="after")
    def _scales_up(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is under replicas {self.replicas}")
        return self

    @model_validator(mode="after")
    def _listens_twice(self) -> Self:
        if self.grpc_port and self.grpc_port == self.port:
            raise ValueError(f"--port and --grpc-port are both {self.port}: choose two")
        return self

    @property
    def threads_each(self) -> int:
        """Threads per replica."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.most_replicas)

    @property
    def most_replicas(self) -> int:
        """Upper limit of the number of replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas

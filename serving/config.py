"""What a server is told: where it listens, and its limits. Free of torch and Ray."""

from pydantic import BaseModel, ConfigDict, Field


class ServingConfig(BaseModel):
    """One server. Every limit is for one replica or one request; none is unbounded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; others can reach 0.0.0.0")
    port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    replicas: int = Field(1, gt=0, description="processes that each hold the model")
    threads: int | None = Field(
        None, gt=0, description="torch threads a replica; default: the cores over the replicas"
    )
    max_body_bytes: int = Field(32 * 2**20, gt=0)
    max_inputs: int = Field(64, gt=0, description="pictures or texts in one request")
    max_classes: int = Field(100, gt=0, description="classes in one request")
    max_text_chars: int = Field(10_000, gt=0, description="characters of one text")
    max_pixels: int = Field(50_000_000, gt=0, description="width x height of one picture")
    batch_size: int = Field(
        32, gt=0, description="texts, or crops of pictures, in one forward pass"
    )
    batch_wait_seconds: float = Field(
        0.0, ge=0, description="how long an idle replica waits for a batch to fill"
    )
    max_queued_inputs: int = Field(256, gt=0, description="inputs that wait for the model")
    max_requests: int = Field(128, gt=0, description="requests in progress; beyond it: 429")
    request_timeout_seconds: float = Field(30.0, gt=0)

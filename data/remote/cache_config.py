"""The cache of remote shards, in a recipe and in commands that read shards."""

from pathlib import Path

from pydantic import Field

from data.frozen_config import FrozenConfig


class CacheConfig(FrozenConfig):
    """Where all processes of a machine keep the shards of a URL; a local folder needs none."""

    folder: Path = Field(Path("~/.cache/kway/shards"), description="on a disk of this machine")
    gigabytes: float = Field(50, gt=0, description="of that disk at most; 1 GB is 10^9 bytes")
    attempts: int = Field(
        8, ge=1, le=100, description="to fetch a file where the network or the server fails"
    )

    @property
    def max_bytes(self) -> int:
        return int(self.gigabytes * 1e9)

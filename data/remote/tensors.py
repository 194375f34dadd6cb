"""A safetensors file behind a URL that belongs to a whole dataset, such as its label vectors."""

import os
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

from data.config import CacheConfig
from data.remote.cache import Cache
from data.remote.fetch import fetch


def fetched_tensors(url: str, content: str, config: CacheConfig) -> Path:
    """Its copy in the cache, where it is known by `content`, a digest; raises as `fetch`."""
    cache = Cache(config.folder, config.max_bytes)
    name = f"{content}.safetensors"

    def fill(file: IO[bytes]) -> None:
        fetch(url, file, attempts=config.attempts, max_bytes=cache.max_bytes, check=_check)

    os.close(cache.open(name, fill))
    cache.trim()
    return cache.path(name)


def _check(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"it is damaged: {error}") from error

"""A safetensors file behind a URL that belongs to a whole dataset, such as its label vectors."""

import hashlib
import os
from pathlib import Path
from typing import IO

from data.remote.cache import Cache
from data.remote.cache_config import CacheConfig
from data.remote.fetch import fetch


def fetched_tensors(url: str, sha256: str, config: CacheConfig) -> Path:
    """Its copy in the cache, where it is known by its SHA-256; raises as `fetch`.

    A copy that was damaged there is fetched again.
    """
    cache = Cache(config.folder, config.max_bytes)
    name = f"{sha256}.safetensors"

    def fill(file: IO[bytes]) -> None:
        fetch(url, file, attempts=config.attempts, max_bytes=cache.max_bytes, sha256=sha256)

    with open(cache.open(name, fill), "rb") as file:
        sound = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if not sound:
        cache.remove(name)
        os.close(cache.open(name, fill))
    cache.trim()
    return cache.path(name)

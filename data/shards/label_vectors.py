"""The label vectors of a folder of shards, one per class, loaded from disk or from a URL."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
from safetensors import SafetensorError, safe_open

from data.files import sha256_of
from data.remote.cache import Cache
from data.remote.config import DEFAULT_CACHE, CacheConfig, check_url, file_url, is_url
from data.remote.fetch import fetch
from data.retry import retried
from data.shards.manifest import Manifest


def load_label_vectors(
    folder: Path | str, manifest: Manifest, cache: CacheConfig = DEFAULT_CACHE
) -> np.ndarray:
    """Return one vector per class, float32 [K, D], in class-list order.

    Raises ValueError if the source does not provide label vectors or the file does not match the
    manifest, and FileNotFoundError if the file is missing.
    """
    name, digest = manifest.label_vectors, manifest.label_vectors_sha256
    if name is None or digest is None:
        raise ValueError(
            f"{folder}: source {manifest.source.kind} does not provide label vectors: use dense "
            "class weights"
        )
    if is_url(folder):
        where = file_url(check_url(str(folder)), name)
        path = _fetched(where, digest, cache)
    else:
        path = Path(folder) / name
        where = str(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: copy it or run kway shard again")
        if retried(where, lambda: sha256_of(path)) != digest:
            raise ValueError(
                f"{path} does not match the manifest (its SHA-256 differs): copy it again or run "
                "kway shard again"
            )
    # The file is the one that was written, but another program may have written it.
    try:
        with safe_open(path, framework="numpy") as file:
            vectors: np.ndarray = file.get_tensor("vectors")
    except SafetensorError as error:
        raise ValueError(
            f"{where} does not contain vectors ({error}): run kway shard again"
        ) from error
    if vectors.ndim != 2 or len(vectors) != len(manifest.classes):
        raise ValueError(
            f"{where} has shape {list(vectors.shape)}, but the manifest has "
            f"{len(manifest.classes)} classes: run kway shard again"
        )
    if vectors.dtype != np.float32 or not np.isfinite(vectors).all():
        raise ValueError(
            f"{where} contains values that are not finite float32: run kway shard again"
        )
    return vectors


def check_label_vectors(folder: Path | str, manifest: Manifest) -> None:
    """Raise the errors of `load_label_vectors`. A copy in the cache is not used."""
    with TemporaryDirectory() as temporary:
        load_label_vectors(folder, manifest, CacheConfig(folder=Path(temporary)))


def _fetched(url: str, sha256: str, config: CacheConfig) -> Path:
    """Return the path of the cached copy, which is named by its SHA-256. Raises the errors of
    `fetch`.

    A damaged copy is fetched again.
    """
    cache = Cache(config.folder, config.max_bytes)
    name = f"{sha256}.safetensors"

    def fill(file: IO[bytes]) -> None:
        fetch(url, file, attempts=config.attempts, max_bytes=cache.max_bytes, sha256=sha256)

    for _ in range(2):
        with open(cache.open(name, fill, size=None), "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return cache.path(name)
        cache.remove(name)
    raise OSError(f"{cache.path(name)} is damaged although it was fetched again: check the disk")

"""The label vectors of a folder of shards, one per class, loaded from disk or from a URL."""

from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from safetensors import SafetensorError, safe_open

from data.files import sha256_of
from data.remote.cache import cached_copy
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
    if manifest.label_vectors is None:
        raise ValueError(
            f"{folder}: source {manifest.source.kind} does not provide label vectors: use dense "
            "class weights"
        )
    digest = manifest.label_vectors_sha256
    assert digest is not None
    if is_url(folder):
        url = file_url(check_url(str(folder)), manifest.label_vectors)
        path = cached_copy(url, digest, cache)
        if sha256_of(path) != digest:
            path = cached_copy(url, digest, cache, again=True)
    else:
        path = Path(folder) / manifest.label_vectors
        retried(str(path), lambda: _check_digest(path, digest))
    return _vectors(path, len(manifest.classes))


def check_label_vectors(folder: Path | str, manifest: Manifest) -> None:
    """Raise the errors of `load_label_vectors`. A copy in the cache is not used."""
    if isinstance(folder, Path) or manifest.label_vectors is None:
        load_label_vectors(folder, manifest)
        return
    url, digest = file_url(folder, manifest.label_vectors), manifest.label_vectors_sha256
    attempts, limit = DEFAULT_CACHE.attempts, DEFAULT_CACHE.max_bytes
    with TemporaryFile() as file:
        fetch(url, file, attempts=attempts, max_bytes=limit, sha256=digest)
        _vectors(Path(f"/proc/self/fd/{file.fileno()}"), len(manifest.classes))


def _check_digest(path: Path, digest: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy it or run kway shard again")
    if sha256_of(path) != digest:
        raise ValueError(
            f"{path} does not match the manifest (its SHA-256 differs): copy it again or run kway "
            "shard again"
        )


def _vectors(path: Path, num_classes: int) -> np.ndarray:
    """Read the vectors in the file at `path`.

    Raises ValueError if the file has the expected digest but invalid content.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            vectors: np.ndarray = file.get_tensor("vectors")
    except SafetensorError as error:
        raise ValueError(
            f"{path} does not contain vectors ({error}): run kway shard again"
        ) from error
    if vectors.ndim != 2 or len(vectors) != num_classes:
        raise ValueError(
            f"{path} has shape {list(vectors.shape)}, but the manifest has {num_classes} classes: "
            "run kway shard again"
        )
    if vectors.dtype != np.float32 or not np.isfinite(vectors).all():
        raise ValueError(
            f"{path} contains values that are not finite float32: run kway shard again"
        )
    return vectors

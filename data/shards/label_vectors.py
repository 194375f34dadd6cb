"""The label vectors of a folder of shards, one per class, loaded from disk or from a URL."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from data.files import sha256_of
from data.remote.cache import read_mapped
from data.remote.config import DEFAULT_CACHE, CacheConfig, address, folder_or_url
from data.retry import retried
from data.shards.manifest import Manifest


def load_label_vectors(
    folder: Path | str, manifest: Manifest, cache: CacheConfig = DEFAULT_CACHE
) -> np.ndarray:
    """Return one vector per class, float32 [K, D], in class-list order.

    Raises ValueError if the source does not provide label vectors or the file does not match the
    manifest, and FileNotFoundError if the file is missing.
    """
    folder = folder_or_url(str(folder))
    name, digest = manifest.label_vectors, manifest.label_vectors_sha256
    if name is None or digest is None:
        raise ValueError(
            f"{folder}: source {manifest.source.kind} does not provide label vectors: use dense "
            "class weights"
        )
    where = address(folder, name)

    def read(path: Path) -> np.ndarray:
        if retried(str(path), lambda: sha256_of(path)) != digest:
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

    return read_mapped(folder, name, digest, cache, read)

"""Webdataset keys made of the paths of files."""

import hashlib
from collections.abc import Iterable, Iterator

# A tar header holds a name of 100 bytes; the extension needs a few.
_MAX_KEY_BYTES = 90


def webdataset_keys(paths: Iterable[str]) -> Iterator[str]:
    """A key a path: the path without ending; made unique, and short enough for tar."""
    seen: set[str] = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        stem = name.rpartition(".")[0].replace(".", "_") or "_"
        key = f"{folder}/{stem}" if folder else stem
        encoded = key.encode("utf-8", "surrogateescape")
        if len(encoded) > _MAX_KEY_BYTES or not key.isprintable():
            key = hashlib.sha256(encoded).hexdigest()[:32]
        if key in seen:
            suffix = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
            key = f"{key}~{suffix[:8]}"
        seen.add(key)
        yield key

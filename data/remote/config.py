"""The configuration of shards at a URL: supported URL schemes, and the cache.

This module does not access the network.
"""

from pathlib import Path
from urllib.parse import quote, urlsplit

from pydantic import Field

from data.base_config import FrozenConfig

SCHEMES = ("file", "http", "https", "s3", "gs", "memory")


def is_url(shards: Path | str) -> bool:
    """Return whether `shards` is a URL; any other text is a local path."""
    return isinstance(shards, str) and "://" in shards


def folder_or_url(text: str) -> Path | str:
    """Return a URL as checked text, and any other text as a local path."""
    return check_url(text) if is_url(text) else Path(text)


def check_url(url: str) -> str:
    """Return `url` without trailing slashes. Raises ValueError for an unsupported URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or "://" in rest:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{url} has an unsupported URL scheme: use a path, or {known}")
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(f"{url} has a query or a fragment: use the URL of a folder")
    if parts.username is not None:
        raise ValueError(
            f"the {scheme}:// URL contains a user name, which would appear in logs: remove it"
        )
    if not rest.strip("/"):
        raise ValueError(f"{url} does not contain a host or folder: add one")
    return url.rstrip("/")


def file_url(folder: str, file: str) -> str:
    """Return the URL of a file that a manifest lists, in the folder at the URL `folder`."""
    if file in (".", ".."):
        raise ValueError(f"{folder}: {file!r} is not a file name: create the manifest again")
    return f"{folder}/{quote(file) if folder.startswith('http') else file}"


def address(folder: Path | str, file: str) -> str:
    """Return the path or URL of a file in the folder at a path or URL."""
    return file_url(folder, file) if isinstance(folder, str) else str(folder / file)


class CacheConfig(FrozenConfig):
    """The cache for shards at a URL, shared by all processes on a machine.

    For local folders, it contains only the indices of splits and united class lists.
    """

    folder: Path = Field(Path("~/.cache/kway/shards"), description="cache folder on a local disk")
    gigabytes: float = Field(
        50, gt=0, description="maximum size of the cache in GB; 1 GB is 10^9 bytes"
    )
    attempts: int = Field(
        8,
        ge=1,
        le=100,
        description="maximum number of attempts to fetch a file if the network or server fails",
    )

    @property
    def max_bytes(self) -> int:
        return int(self.gigabytes * 1e9)


DEFAULT_CACHE = CacheConfig()

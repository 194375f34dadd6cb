"""A folder of shards at a URL, read through the cache of this machine.

In the cache, a shard is named by its SHA-256, and an index by the manifest entry of its shard.
Different datasets or versions therefore never mix, and identical shards are stored once.
"""

import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from data.loading.order import Order
from data.remote.cache import Cache
from data.remote.config import CacheConfig, check_url, file_url
from data.remote.fetch import fetch
from data.shards.folder import ShardFolder
from data.shards.index import ShardIndex, index_path, map_index, max_index_bytes
from data.shards.manifest import ShardInfo

_log = logging.getLogger("kway.data")

_INDEX_THREADS = 16
_INDEX_TRIES = 10
_REPORT_SECONDS = 5.0


class RemoteFolder(ShardFolder):
    """The shards at `url`. Raises ValueError for an unsupported URL."""

    verified = True
    bytes_at_once: int

    def __init__(self, url: str, config: CacheConfig) -> None:
        self.url = check_url(url)
        self._attempts = config.attempts
        self._cache = Cache(config.folder, config.max_bytes)
        self._bound = f"{config.gigabytes:g}"
        self.bytes_at_once = self._cache.max_bytes

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def address(self, shard: ShardInfo) -> str:
        return file_url(self.url, shard.file)

    def remedy(self, shard: ShardInfo) -> str:
        return f"delete the cached copy {self._cache.path(_shard_name(shard))} and retry"

    # ---------------------------------------------------------------- indices

    def indices(self, shards: Sequence[ShardInfo]) -> list[ShardIndex]:
        """Return the indices of `shards`. Missing indices are fetched first, several in
        parallel.

        Also raises ValueError if the cache is too small for the indices and the largest shard.
        """
        missing = [shard for shard in shards if not self._cache.has(_index_name(shard))]
        self._check_indices(missing)
        self._fetch_indices(missing)
        if missing:
            self._cache.trim()
        found = [self._index(shard) for shard in shards]
        used = sum(self._cache.size(_index_name(shard)) for shard in shards)
        self.bytes_at_once = self._cache.max_bytes - used
        largest = max(shard.bytes for shard in shards)
        if largest > self.bytes_at_once:
            raise ValueError(
                f"{self.url} has a shard of {_gigabytes(largest)} and indices of "
                f"{_gigabytes(used)}, but data.cache.gigabytes is {self._bound}: raise it to "
                f"{_rounded_up(largest + used)} or more"
            )
        return found

    def keep_indices(self, shards: Sequence[ShardInfo]) -> None:
        for shard in shards:
            self._cache.has(_index_name(shard))

    def _check_indices(self, shards: Sequence[ShardInfo]) -> None:
        """Raise ValueError, before any fetch, if the cache is too small for the indices."""
        most = sum(map(max_index_bytes, shards))
        if most > self._cache.max_bytes:
            raise ValueError(
                f"{self.url} has {len(shards):,} indices, up to {_gigabytes(most)} in total, but "
                f"data.cache.gigabytes is {self._bound}: raise it to {_rounded_up(most)} or more"
            )

    def _fetch_indices(self, shards: Sequence[ShardInfo]) -> None:
        pool = ThreadPoolExecutor(_INDEX_THREADS)
        try:
            reported = time.monotonic()
            futures = [pool.submit(self._fetch_index, shard) for shard in shards]
            for number, future in enumerate(as_completed(futures), start=1):
                future.result()
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    line = f"{self.url}: fetched {number:,} of {len(shards):,} indices"
                    print(line, file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch_index(self, shard: ShardInfo) -> None:
        url = index_path(Path(shard.file)).name

        def fill(file: IO[bytes]) -> None:
            fetch(
                file_url(self.url, url),
                file,
                attempts=self._attempts,
                max_bytes=max_index_bytes(shard),
                check=lambda path: _open_index(path, shard),
            )

        os.close(self._cache.open(_index_name(shard), fill))

    def _index(self, shard: ShardInfo) -> ShardIndex:
        """Open the cached index. It is fetched again if the copy is damaged or was just evicted."""
        path = self._cache.path(_index_name(shard))
        for _ in range(_INDEX_TRIES):
            try:
                return _open_index(path, shard)
            except FileNotFoundError:
                pass
            except ValueError as error:
                _log.warning("%s %s; fetching it again", path, error)
                self._cache.remove(path.name)
            self._fetch_index(shard)
        return _open_index(path, shard)

    # ---------------------------------------------------------------- shards

    def open(self, shard: ShardInfo) -> int:
        """Open a shard in the cache, fetching it first if necessary."""
        return self._cache.open(
            _shard_name(shard), lambda file: self._fetch(shard, file), size=shard.bytes
        )

    def evicted(self, descriptor: int) -> bool:
        return os.fstat(descriptor).st_nlink == 0

    def prefetch(self, shard: ShardInfo) -> None:
        self._cache.fetch(
            _shard_name(shard), lambda file: self._fetch(shard, file), size=shard.bytes
        )

    def _fetch(self, shard: ShardInfo, file: IO[bytes]) -> None:
        fetch(
            self.address(shard),
            file,
            attempts=self._attempts,
            max_bytes=shard.bytes,
            exact=True,
            sha256=shard.sha256,
        )

    def check_order(self, order: Order, shards: Sequence[ShardInfo], groups_at_once: int) -> None:
        """Check the worst case, in which the largest shards are all read at the same time."""
        largest = sorted((shard.bytes for shard in shards), reverse=True)
        at_once = min(order.shards_at_once * groups_at_once, len(shards))
        needed = sum(largest[:at_once])
        if needed <= self.bytes_at_once:
            return
        fitting, held = 0, 0
        while held + largest[fitting] <= self.bytes_at_once:
            held += largest[fitting]
            fitting += 1
        what = "all shards" if order.is_global else f"{at_once} shards at a time"
        enough = _rounded_up(needed + self._cache.max_bytes - self.bytes_at_once)
        raise ValueError(
            f"shuffling mixes {what} of {self.url}, which requires {_gigabytes(needed)} of cache, "
            f"but data.cache.gigabytes is {self._bound}: raise it to {enough} or more, or set "
            f"data.shuffle_shards to {max(1, fitting // groups_at_once)} or less"
        )


def _shard_name(shard: ShardInfo) -> str:
    return f"{shard.sha256}.tar"


def _key(shard: ShardInfo) -> str:
    """Return the cache key of an index.

    The same tar may have several indices, with different class lists, splits or names.
    """
    return hashlib.sha256(shard.model_dump_json().encode()).hexdigest()


def _index_name(shard: ShardInfo) -> str:
    return index_path(Path(_key(shard))).name


def _open_index(path: Path, shard: ShardInfo) -> ShardIndex:
    """Open the index at `path`. Raises ValueError with the reason but without the path."""
    index = map_index(path)
    if index.info != shard:
        raise ValueError("does not match the manifest")
    return index


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _rounded_up(count: int) -> str:
    """Return `count` bytes in gigabytes, rounded up to two decimal places."""
    return f"{math.ceil(count / 1e7) / 100:g}"

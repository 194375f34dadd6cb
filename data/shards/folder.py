"""The shards of a split in a folder, local or at a URL, and their open files.

Shards at a URL are fetched once per machine into a cache (`data/remote/cache.py`), where a shard is
named by its SHA-256. Different datasets or versions therefore never mix, and identical shards are
stored once. While one group of an order is read, threads fetch the next one.
"""

import hashlib
import logging
import math
import os
import resource
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from threading import Thread, main_thread
from typing import IO, Any, TypeVar

from data.loading.order import InOrder, Order
from data.messages import SHARD_AGAIN, kway_command
from data.remote.cache import Cache
from data.remote.config import CacheConfig, check_url, file_url, is_url
from data.remote.fetch import fetch
from data.retry import TransientError, retried, wait_before_retry
from data.shards.index import ShardIndex, index_path, max_index_bytes, open_index, parse_index
from data.shards.manifest import ShardInfo
from data.shards.split_index import SplitIndex, index_bytes, read_split_index, write_split_index

_log = logging.getLogger("kway.data")

Answer = TypeVar("Answer")

_INDEX_THREADS = 16
_PREFETCH_THREADS = 4
_REPORT_SECONDS = 5.0
_TOUCH_SECONDS = 60.0


class ShardFolder:
    """The `shards` of one split in the folder at a path or URL. `str` returns the path or URL.

    bytes_at_once: the maximum total size, in bytes, of the shards that are stored at the same time,
    or None for a local folder. Raises ValueError for an unsupported URL.
    """

    def __init__(
        self, folder: Path | str, shards: Sequence[ShardInfo], config: CacheConfig
    ) -> None:
        self.path: Path | str = check_url(str(folder)) if is_url(folder) else Path(folder)
        self.bytes_at_once: int | None = None
        self._shards = shards
        self._config = config
        self._cache: Cache | None = None
        self._files: OrderedDict[int, int] = OrderedDict()
        # Leave the other half to the rest of the process.
        self._max_files = max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._queue: deque[int] = deque()
        self._read_group: tuple[Order | InOrder, int] | None = None
        self._read_at = 0.0
        self._has_warned = False
        if is_url(folder):
            self._cache = Cache(config.folder, config.max_bytes)
            index_size = index_bytes(sum(shard.samples for shard in shards))
            self.bytes_at_once = config.max_bytes - index_size
            self._check_size(max(shard.bytes for shard in shards), index_size)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path or URL, for titles."""
        path = self.path
        return path.resolve().name if isinstance(path, Path) else path.rpartition("/")[2]

    def address(self, shard: ShardInfo) -> str:
        """Return the path or URL of a shard."""
        path = self.path
        return str(path / shard.file) if isinstance(path, Path) else file_url(path, shard.file)

    def remedy(self, shard: ShardInfo) -> str:
        """Return the fix that messages suggest for a shard whose checksum does not match."""
        if self._cache is None:
            return f"run {kway_command('shard', 'verify', self.path)}"
        return f"delete the cached copy {self._cache.path(_cached_name(shard))} and retry"

    # ---------------------------------------------------------------- index

    def index(self) -> SplitIndex:
        """Return the index of the split, which is built from the indices of its shards once per
        machine and kept in the cache.

        Raises FileNotFoundError or ValueError if the index of a shard is missing or damaged, or
        does not match the manifest.
        """
        num_samples = sum(shard.samples for shard in self._shards)
        key = hashlib.sha256()
        for shard in self._shards:
            key.update(shard.model_dump_json().encode())
            if isinstance(self.path, Path):  # notice a replaced index
                key.update(_signature(index_path(self.path / shard.file)))
        name = f"{key.hexdigest()}.split-index"
        try:
            cache = self._cache or Cache(self._config.folder, self._config.max_bytes)
            for _ in range(2):
                descriptor = cache.open(name, self._write_index, size=index_bytes(num_samples))
                with open(descriptor, "rb") as file:
                    if (found := read_split_index(file, num_samples)) is not None:
                        return found
                _log.warning("%s is damaged: building it again", cache.path(name))
                cache.remove(name)
        except (FileNotFoundError, TransientError):
            raise
        except OSError as error:
            _log.warning("%s; keeping the index of %s in memory", error, self)
        content = BytesIO()
        self._write_index(content)
        found = read_split_index(content, num_samples)
        assert found is not None
        return found

    def _write_index(self, file: IO[bytes]) -> None:
        write_split_index(file, self._shard_indices(), sum(one.samples for one in self._shards))

    def _shard_indices(self) -> Iterator[ShardIndex]:
        reported = time.monotonic()
        pool = ThreadPoolExecutor(_INDEX_THREADS)
        try:
            for number, found in enumerate(pool.map(self._shard_index, self._shards), start=1):
                yield found
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    line = f"{self}: read {number:,} of {len(self._shards):,} indices"
                    print(line, file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _shard_index(self, shard: ShardInfo) -> ShardIndex:
        path = self.path
        if isinstance(path, Path):
            index = retried(str(path), lambda: open_index(path / shard.file))
            return self._checked(index, shard, index_path(path / shard.file))
        url, content = file_url(path, index_path(Path(shard.file)).name), BytesIO()

        def parse() -> ShardIndex:
            try:
                return self._checked(parse_index(content.getvalue()), shard, url)
            except ValueError as error:
                if url in str(error):
                    raise
                raise ValueError(f"{url} {error}: upload it again, or {SHARD_AGAIN}") from error

        found: ShardIndex = fetch(
            url,
            content,
            attempts=self._config.attempts,
            max_bytes=max_index_bytes(shard),
            parse=parse,
        )
        return found

    def _checked(self, index: ShardIndex, shard: ShardInfo, where: Path | str) -> ShardIndex:
        if index.info != shard:
            raise ValueError(
                f"{where} does not match the manifest: copy it again, or {SHARD_AGAIN}"
            )
        return index

    # ---------------------------------------------------------------- files

    def read(self, shard: int, read: Callable[..., Answer], *where: Any) -> Answer:
        """Return `read(descriptor, *where)` for a shard. Retries after a transient error."""
        attempt = 1
        while True:
            try:
                return read(self._file(shard), *where)
            except OSError as error:
                if (descriptor := self._files.pop(shard, None)) is not None:
                    os.close(descriptor)  # a stale descriptor does not recover
                wait_before_retry(self.address(self._shards[shard]), error, attempt)
            attempt += 1

    def pread(self, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` of a shard, or fewer at its end."""
        try:
            descriptor = self._files[shard]
            self._files.move_to_end(shard)
            return os.pread(descriptor, size, offset)
        except (KeyError, OSError):
            return self.read(shard, os.pread, size, offset)

    def _file(self, shard: int) -> int:
        """Return the descriptor of a shard.

        If too many descriptors are open, the least recently used one is closed.
        """
        if (descriptor := self._files.get(shard)) is not None:
            return descriptor
        info, path = self._shards[shard], self.path
        if isinstance(path, Path):
            descriptor = os.open(path / info.file, os.O_RDONLY)
        else:
            assert self._cache is not None
            descriptor = self._cache.open(_cached_name(info), self._fill(info), size=info.bytes)
        self._files[shard] = descriptor
        while len(self._files) > 1 and (
            len(self._files) > self._max_files
            # An evicted shard occupies disk space until its descriptor is closed.
            or os.fstat(next(iter(self._files.values()))).st_nlink == 0
        ):
            os.close(self._files.popitem(last=False)[1])
        return descriptor

    def _fill(self, shard: ShardInfo) -> Callable[[IO[bytes]], None]:
        def fill(file: IO[bytes]) -> None:
            fetch(
                self.address(shard),
                file,
                attempts=self._config.attempts,
                max_bytes=shard.bytes,
                exact=True,
                sha256=shard.sha256,
            )

        return fill

    def close(self) -> None:
        """Close all files and start no more downloads. A later read opens files again."""
        self._queue.clear()
        self._read_group = None
        while self._files:
            os.close(self._files.popitem()[1])

    # ---------------------------------------------------------------- prefetching

    def will_read(self, order: Order | InOrder, position: int) -> None:
        """Fetch the shards that `order` reads at `position` and after it: the current group and the
        next one.

        The call is cheap if the group is unchanged. Once a minute, the shards of the group are
        marked as in use, so that they are not evicted. For a local folder, the call has no effect.
        """
        if self._cache is None:
            return
        current = (order, order.group(position))
        if current == self._read_group and time.monotonic() - self._read_at < _TOUCH_SECONDS:
            return
        self._read_group, self._read_at = current, time.monotonic()
        # Each call has its own queue. Threads of the previous call end when their queue is cleared.
        self._queue.clear()
        self._queue = queue = deque(self._shards_to_fetch(order, current[1]))
        for _ in range(min(_PREFETCH_THREADS, len(queue))):
            Thread(target=self._drain, args=(queue,), daemon=True).start()

    def _shards_to_fetch(self, order: Order | InOrder, group: int) -> list[int]:
        """Return the shards of a group, and those of the next group that fit in the cache too."""
        wanted = dict.fromkeys(order.shards(group))
        held = sum(self._shards[number].bytes for number in wanted)
        for number in order.shards(group + 1):
            if number in wanted:
                continue
            held += self._shards[number].bytes
            if self.bytes_at_once is not None and held > self.bytes_at_once:
                if not self._has_warned:
                    _log.warning(
                        "%s: the next shards do not fit in the cache together with the current "
                        "ones, so training waits for downloads: raise data.cache.gigabytes or "
                        "lower data.shuffle_shards",
                        self,
                    )
                self._has_warned = True
                break
            wanted[number] = None
        return list(wanted)

    def _drain(self, queue: deque[int]) -> None:
        while queue:
            try:
                shard = self._shards[queue.popleft()]
            except IndexError:
                return
            try:
                assert self._cache is not None
                self._cache.fetch(_cached_name(shard), self._fill(shard), size=shard.bytes)
            except (OSError, ValueError, RuntimeError) as error:
                # While the interpreter exits, no thread can be started and no task scheduled.
                if not main_thread().is_alive():
                    return
                # The loader raises this error when it reads the shard itself.
                _log.warning("prefetch failed: %s", error)

    def _check_size(self, largest: int, index_size: int) -> None:
        assert self.bytes_at_once is not None
        if largest > self.bytes_at_once:
            raise ValueError(
                f"{self} has a shard of {_gigabytes(largest)} and an index of "
                f"{_gigabytes(index_size)}, but data.cache.gigabytes is "
                f"{self._config.gigabytes:g}: raise it to {_rounded_up(largest + index_size)} or "
                "more"
            )

    def check_order(self, order: Order, groups_at_once: int) -> None:
        """Raise ValueError if the shards of `groups_at_once` groups do not fit in the cache.

        This checks the worst case, in which the largest shards are all read at the same time.
        """
        if (capacity := self.bytes_at_once) is None:
            return
        largest = sorted((shard.bytes for shard in self._shards), reverse=True)
        at_once = min(order.shards_at_once * groups_at_once, len(largest))
        needed = sum(largest[:at_once])
        if needed <= capacity:
            return
        fitting, held = 0, 0
        while held + largest[fitting] <= capacity:
            held += largest[fitting]
            fitting += 1
        what = "all shards" if order.is_global else f"{at_once} shards at a time"
        enough = _rounded_up(needed + self._config.max_bytes - capacity)
        raise ValueError(
            f"shuffling mixes {what} of {self}, which requires {_gigabytes(needed)} of cache, "
            f"but data.cache.gigabytes is {self._config.gigabytes:g}: raise it to {enough} or "
            f"more, or set data.shuffle_shards to {max(1, fitting // groups_at_once)} or less"
        )


def _cached_name(shard: ShardInfo) -> str:
    return f"{shard.sha256}.tar"


def _signature(path: Path) -> bytes:
    """Return what changes when a file is replaced."""
    try:
        about = retried(str(path), path.stat)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: copy it, or {SHARD_AGAIN}") from None
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ino}".encode()


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _rounded_up(count: int) -> str:
    """Return `count` bytes in gigabytes, rounded up to two decimal places."""
    return f"{math.ceil(count / 1e7) / 100:g}"

"""One read of a file from its first byte to its last: members as they pass, and SHA-256 of all."""

import hashlib
from pathlib import Path
from types import TracebackType

_CHUNK = 4 << 20


class ShardPass:
    """Gives members in the order of their offsets while the whole file is hashed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._chunk = memoryview(b"")
        self._start = 0

    def take(self, offset: int, size: int) -> memoryview:
        """Bytes [offset, offset + size), fewer where the file ends before; valid until the next.

        Raises ValueError for an offset before the last one.
        """
        if offset < self._start:
            raise ValueError(f"byte {offset:,} was asked for after byte {self._start:,}")
        if offset + size > self._start + len(self._chunk):
            self._advance(offset, size)
        first = offset - self._start
        return self._chunk[first : first + size]

    def sha256(self) -> str:
        """Hash what is left; hexadecimal digits of the whole file."""
        while self._read(_CHUNK):
            pass
        return self._sha256.hexdigest()

    def _advance(self, offset: int, size: int) -> None:
        while offset >= self._start + len(self._chunk):
            self._start += len(self._chunk)
            self._chunk = memoryview(self._read(_CHUNK))
            if not self._chunk:
                self._start = offset
                return
        rest = self._chunk[offset - self._start :]
        parts = [bytes(rest)]
        missing = size - len(rest)
        while missing > 0 and (more := self._read(max(missing, _CHUNK))):
            parts.append(more)
            missing -= len(more)
        self._chunk, self._start = memoryview(b"".join(parts)), offset

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._sha256.update(data)
        return data

    def __enter__(self) -> "ShardPass":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

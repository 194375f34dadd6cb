"""`Storage`: where the watches, their hits and the positions of feeds are kept across restarts.

`kway serve` uses `StateFile` (`serving/watches/state_file.py`), a Ray cluster uses Ray's key-value
store (`serving/deploy/private_ray.py`), and tests use `MemoryStorage`.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol


class Storage(Protocol):
    """A sorted mapping with one writer."""

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield all entries in the order of their keys."""
        ...

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        """Write entries and delete those whose value is None, if they exist. The changes survive
        the death of the process once this returns.

        Raises WatchesDownError if they cannot be written. May be called from any thread.
        """
        ...


class MemoryStorage(dict[str, bytes]):
    """Entries that are lost with the process."""

    def items(self) -> Iterator[tuple[str, bytes]]:  # type: ignore[override]
        return iter(sorted(super().items()))

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self.pop(key, None)
            else:
                self[key] = value

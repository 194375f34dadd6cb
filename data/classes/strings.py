"""A column of strings: their UTF-8 bytes, one after another, and where each one ends.

A string takes its bytes and 8 more, in memory that processes can share. As Python objects, a
list of strings costs about 60 bytes more per string and process.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

# Strings per step of a loop over a column, which bounds its temporary arrays.
CHUNK = 1 << 16
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0
_MIX, _MAX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 2**64 - 1


class Strings(Sequence[str]):
    """An immutable sequence of N strings in arrays that may be mapped from a file."""

    def __init__(
        self, text: NDArray[np.uint8], ends: NDArray[np.int64], path: Path | None = None
    ) -> None:
        """text: the bytes of all strings in UTF-8. ends [N]: the end of each string in `text`.
        path: the file with these arrays, for error messages.
        """
        self.text, self.ends, self.path = text, ends, path

    @classmethod
    def of(cls, strings: Iterable[str]) -> "Strings":
        """Copy strings to new arrays, unless they are in arrays already. The input is read once.
        Raises ValueError for a string with a lone surrogate.
        """
        if isinstance(strings, Strings):
            return strings
        text, lengths = bytearray(), [np.zeros(0, np.int64)]
        rest = iter(strings)
        try:
            while chunk := [one.encode() for one in islice(rest, CHUNK)]:
                text += b"".join(chunk)
                lengths.append(np.fromiter(map(len, chunk), np.int64, len(chunk)))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{error.object[:100]!r} contains a lone surrogate, which UTF-8 cannot store: "
                "rename it"
            ) from error
        ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
        return cls(np.frombuffer(text, np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Strings": ...
    def __getitem__(self, index: int | slice) -> "str | Strings":
        """Return one string, or a slice with step 1 as views of the same arrays."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"the step of a slice is {step}: pass 1")
            first, ends = self._start(start), self.ends[start : max(start, stop)]
            last = int(ends[-1]) if len(ends) else first
            return Strings(self.text[first:last], ends - first, self.path)
        number = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} strings")
        start, end = self._start(number), int(self.ends[number])
        if not 0 <= start <= end <= len(self.text):
            raise ValueError(f"{self.path}: string {number} is damaged: copy the file again")
        return str(self.text[start:end].tobytes(), "utf-8")

    def __iter__(self) -> Iterator[str]:
        for chunk in self.chunks():
            text, start = chunk.text.tobytes(), 0
            for end in chunk.ends.tolist():
                yield str(text[start:end], "utf-8")
                start = end

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of the same strings."""
        if isinstance(other, Strings):
            return np.array_equal(self.ends, other.ends) and np.array_equal(self.text, other.text)
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3])) + (", …" if len(self) > 3 else "")
        return f"Strings({shown}; {len(self)})"

    def chunks(self) -> Iterator["Strings"]:
        """Yield consecutive slices of at most `CHUNK` strings."""
        for start in range(0, len(self), CHUNK):
            chunk = self[start : start + CHUNK]
            if (np.diff(chunk.ends, prepend=0) < 0).any() or len(chunk.text) != chunk.ends[-1]:
                raise ValueError(
                    f"{self.path}: string {start} or a later one is damaged: copy the file again"
                )
            yield chunk

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of bytes [N] of each string."""
        return np.diff(self.ends, prepend=0)

    def at(self, indices: NDArray[np.integer]) -> "Strings":
        """Return a copy of the strings at `indices`, in this order."""
        parts = []
        for start in range(0, len(indices), CHUNK):
            chunk = indices[start : start + CHUNK]
            stops = self.ends[chunk]
            lengths = stops - np.where(chunk > 0, self.ends[chunk - 1], 0)
            ends = np.cumsum(lengths, dtype=np.int64)
            # Byte i of the part is at i plus the distance between its string here and there.
            source = np.arange(ends[-1]) + np.repeat(stops - ends, lengths)
            parts.append(Strings(self.text[source], ends))
        return Strings.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence["Strings"]) -> "Strings":
        """Return the strings of all parts. Errors name the file of the first part."""
        starts = np.cumsum([0, *(len(part.text) for part in parts)], dtype=np.int64)
        ends = (part.ends + start for part, start in zip(parts, starts[:-1], strict=True))
        return cls(
            np.concatenate([np.zeros(0, np.uint8), *(part.text for part in parts)]),
            np.concatenate([np.zeros(0, np.int64), *ends]),
            parts[0].path if parts else None,
        )

    def hashes(self) -> NDArray[np.uint64]:
        """Return a 64-bit hash [N] of each string, the same in every process.

        It is sum_i (byte_i + 1) P^i modulo 2^64, mixed by the finalizer of splitmix64. Strings that
        collide on purpose make lookups slower, but not wrong: every hit is compared as a string.
        """
        parts = [_hashes(chunk) for chunk in self.chunks()]
        return np.concatenate([np.zeros(0, np.uint64), *parts])

    def _start(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0


def equal_strings(ours: Strings, theirs: Strings) -> NDArray[np.bool_]:
    """Return whether each string of `ours` [N] equals the one of `theirs` [N] at its position."""
    equal: NDArray[np.bool_] = ours.lengths() == theirs.lengths()
    same = np.flatnonzero(equal)
    ours, theirs = ours.at(same), theirs.at(same)
    differing = np.flatnonzero(ours.text != theirs.text)
    equal[same[np.searchsorted(ours.ends, differing, side="right")]] = False
    return equal


def hash_of(string: str) -> int:
    """Return the hash that `Strings.hashes` returns for this string, without creating arrays.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    value, power = 0, 1
    for byte in string.encode():
        value += (byte + 1) * power
        power = power * _FACTOR & _MAX
    value &= _MAX
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor & _MAX
    return value ^ (value >> 31)


def _hashes(chunk: Strings) -> NDArray[np.uint64]:
    lengths = chunk.lengths()
    starts = chunk.ends - lengths
    powers = np.full(int(lengths.max()) + 1, _FACTOR, np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    terms = (chunk.text.astype(np.uint64) + np.uint64(1)) * powers[
        np.arange(len(chunk.text)) - np.repeat(starts, lengths)
    ]
    before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    values = before[chunk.ends] - before[starts]
    for shift, factor in _MIX:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed

"""Reads the records of JSONL, CSV, TSV and line-based text files, in byte ranges.

A record is identified by its offset. TSV has no quoting, as its media type specifies, so each line
is a record. CSV is quoted as in RFC 4180, and quoted cells may span several lines.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from data.messages import shown

Kind = Literal["jsonl", "csv", "tsv", "lines"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "lines",
}
SPAN_BYTES = 32 << 20
_TEXT_OF_LINES = "text"
_MAX_RECORD_BYTES = 4 << 20
_DIGEST_BLOCKS = 16
csv.field_size_limit(_MAX_RECORD_BYTES)  # the default is 128 KiB, and a record may be one cell
_DIGEST_BLOCK_BYTES = 1 << 16

Fields = dict[str, Any]


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    columns: the names in the first line of a table, or None for JSONL.
    """

    path: Path
    kind: Kind
    columns: tuple[str, ...] | None
    start: int
    size: int

    def spans(self) -> list[tuple[int, int, int]]:
        """Return byte ranges (first, last, size) that together contain every record once. For CSV,
        there is only one range.
        """
        # A CSV file must be read from the beginning to determine whether a line break is inside
        # quotes.
        step = self.size if self.kind == "csv" else SPAN_BYTES
        ends = [
            (first, min(first + step, self.size)) for first in range(self.start, self.size, step)
        ]
        return [(first, last, last - first) for first, last in ends]

    def rows(
        self, first: int, last: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, Fields | ValueError]]:
        """Yield the offset and the fields of each record that begins in [first, last), except empty
        lines, or the reason why it is malformed. `columns` is for other kinds of files.
        """
        with self.path.open("rb") as file:
            lines = self._lines(file, first, last)
            if self.kind == "csv":
                yield from self._quoted(lines)
            else:
                yield from ((at, self._parsed(line)) for at, line in lines if line.strip(b"\r\n"))

    def where(self, offset: int) -> str:
        """Return the file and the number, from 1, of the line that begins at byte `offset`."""
        with self.path.open("rb") as file:
            blocks = (file.read(min(1 << 20, offset - at)) for at in range(0, offset, 1 << 20))
            before = sum(block.count(b"\n") for block in blocks)
        return f"{self.path}, line {before + 1}"

    def _parsed(self, line: bytes) -> Fields | ValueError:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            if self.kind == "tsv":
                return self._named(text.split("\t"))
            text = text.removeprefix("\ufeff")
            fields = {_TEXT_OF_LINES: text} if self.kind == "lines" else json.loads(text)
        except RecursionError:
            return ValueError("is nested too deeply")
        except ValueError as error:
            return error
        return fields if isinstance(fields, dict) else ValueError("is not a JSON object")

    def _named(self, cells: list[str]) -> Fields | ValueError:
        assert self.columns is not None
        if len(cells) != len(self.columns):
            return ValueError(f"has {len(cells)} cells, but the first line has {len(self.columns)}")
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            return ValueError("is not UTF-8")
        return dict(zip(self.columns, cells, strict=True))

    def _lines(self, file: IO[bytes], first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that begin in [first, last). A line that crosses `first` is not included,
        because it belongs to the previous range.
        """

        def line() -> bytes:
            found = file.readline(_MAX_RECORD_BYTES)
            if len(found) == _MAX_RECORD_BYTES:
                raise ValueError(
                    f"{self.path}, byte {offset}: a line is longer than {_MAX_RECORD_BYTES >> 20} "
                    "MiB: check that the file contains records"
                )
            return found

        offset = first
        file.seek(first - (first > self.start))
        if first > self.start:
            offset += len(line()) - 1
        while offset < last and (found := line()):
            yield offset, found
            offset += len(found)

    def _quoted(
        self, lines: Iterator[tuple[int, bytes]]
    ) -> Iterator[tuple[int, Fields | ValueError]]:
        """Yield the records of CSV lines. A quoted cell may contain line breaks."""
        taken: list[int] = []  # the offsets of the lines of the current record
        ended = False

        def texts() -> Iterator[str]:
            nonlocal ended
            for offset, line in lines:
                taken.append(offset)
                yield line.decode("utf-8", "surrogateescape")
            ended = True
            yield "end"  # a record of its own, unless a quote is open

        try:
            for cells in csv.reader(texts()):
                if ended and taken:
                    raise csv.Error("the file ends inside quotes")
                if cells and not ended:
                    yield taken[0], self._named(cells)
                taken.clear()
        except csv.Error as error:
            raise ValueError(
                f"{self.path}, byte {(taken or [0])[0]}: {error}: check for an unclosed quote"
            ) from error


def open_records(path: Path) -> RecordFile:
    """Open a record file. The extension determines its format, and the first line determines its
    columns.

    Raises FileNotFoundError if the file is missing, and ValueError for an unknown extension or an
    invalid first line.
    """
    endings = ", ".join(KINDS)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass record files ({endings})")
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(
            f"{path} has the unsupported extension {path.suffix!r}: unpack it, or use one of "
            f"{endings}"
        )
    size = path.stat().st_size
    if kind in ("jsonl", "lines"):
        columns = (_TEXT_OF_LINES,) if kind == "lines" else None
        return RecordFile(path, kind, columns, 0, size)
    names, start = _heading(path, kind)
    return RecordFile(path, kind, names, start, size)


def field_value(fields: Fields, name: str) -> Any:
    """Return a field, or None if it is missing. Dots in a name select nested fields."""
    value: Any = fields.get(name)
    if value is None and "." in name:
        value = fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return value


def text_field(fields: Fields, name: str) -> str | None:
    """Return a field as text, or None if it is missing, a list or an object.

    Raises ValueError for an unpaired surrogate.
    """
    value = field_value(fields, name)
    if value is None or isinstance(value, dict | list | bytes):
        return None
    text = value if isinstance(value, str) else str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"has an unpaired surrogate in field {name!r}: correct the field"
        ) from None
    return text


def digest(paths: Sequence[Path]) -> str:
    """Return 16 hexadecimal digits of a hash of the files' names, sizes and contents.

    In files larger than 1 MiB, only 16 evenly spaced blocks of 64 KiB are read, to avoid another
    pass over large inputs.
    """
    whole = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        whole.update(f"{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        last = max(0, size - _DIGEST_BLOCK_BYTES)
        with path.open("rb") as file:
            for block in range(_DIGEST_BLOCKS):
                file.seek(last * block // (_DIGEST_BLOCKS - 1))
                whole.update(file.read(_DIGEST_BLOCK_BYTES))
    return whole.hexdigest()[:16]


def _heading(path: Path, kind: Kind) -> tuple[tuple[str, ...], int]:
    with path.open("rb") as file:
        line = file.readline(_MAX_RECORD_BYTES)
        start = file.tell()
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the first line is not UTF-8: save the file as UTF-8") from error
    if "\r" in text:
        raise ValueError(
            f"{path}: the first line contains a carriage return (CR): save the file with the line "
            "endings LF or CR LF"
        )
    names = text.split("\t") if kind == "tsv" else next(csv.reader([text]), [])
    names = [name.strip() for name in names]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(
            f"{path}: the first line, {shown(text)}, must contain a unique name for every column"
        )
    return tuple(names), start

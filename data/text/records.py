"""Reads the records of JSONL, CSV, TSV and line-based text files, in byte ranges.

A record is identified by its offset. TSV has no quoting, as its media type specifies, so each line
is a record. CSV is quoted as in RFC 4180, and quoted cells may span several lines.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from data.messages import shown
from data.remote.input_path import InputPath

Kind = Literal["jsonl", "csv", "tsv", "lines"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "lines",
}
TEXT_OF_LINES = "text"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
_MAX_RECORD_BYTES = 4 << 20
_DIGEST_BLOCKS = 16
csv.field_size_limit(_MAX_RECORD_BYTES)  # the default is 128 KiB, and a record may be one cell
_DIGEST_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    columns: the names in the first line of a table, or None for JSONL.
    """

    path: InputPath
    kind: Kind
    columns: tuple[str, ...] | None
    start: int
    size: int

    def spans(self, span_bytes: int) -> list[tuple[int, int]]:
        """Return byte ranges that together contain every record once. For CSV, there is only one
        range.
        """
        # A CSV file must be read from the beginning to determine whether a line break is inside
        # quotes.
        step = self.size if self.kind == "csv" else span_bytes
        return [
            (first, min(first + step, self.size)) for first in range(self.start, self.size, step)
        ]

    def records(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of the records that begin in [first, last), except empty lines."""
        name = str(self.path)
        with self.path.open("rb") as file:
            lines = _lines(file, name, self.start, first, last)
            found = _quoted(lines, name) if self.kind == "csv" else lines
            yield from ((offset, data) for offset, data in found if data.strip(b"\r\n"))

    def line(self, offset: int) -> int:
        """Return the number of the line that begins at byte `offset`, from 1."""
        with self.path.open("rb") as file:
            return 1 + sum(
                file.read(min(1 << 20, offset - at)).count(b"\n")
                for at in range(0, offset, 1 << 20)
            )

    def parse(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a record. Raises ValueError with the reason if it is malformed."""
        text = data.decode("utf-8").rstrip("\r\n")
        match self.kind:
            case "lines":
                return {TEXT_OF_LINES: text.removeprefix("\ufeff")}
            case "jsonl":
                try:
                    fields = json.loads(text.removeprefix("\ufeff"))
                except RecursionError:
                    raise ValueError("is nested too deeply") from None
                if not isinstance(fields, dict):
                    raise ValueError("is not a JSON object")
                return fields
        cells = text.split("\t") if self.kind == "tsv" else next(_cells([text]))
        assert self.columns is not None
        if len(cells) != len(self.columns):
            raise ValueError(f"has {len(cells)} cells, but the first line has {len(self.columns)}")
        return dict(zip(self.columns, cells, strict=True))


def open_records(path: InputPath) -> RecordFile:
    """Open a record file. The extension determines its format, and the first line determines its
    columns.

    Raises FileNotFoundError if the file is missing, and ValueError for an unknown extension or an
    invalid first line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass record files ({_endings()})")
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        compressed = path.suffix.lower() in _COMPRESSED
        remedy = "unpack it first" if compressed else f"use one of {_endings()}"
        raise ValueError(f"{path} has the unsupported extension {path.suffix!r}: {remedy}")
    size = path.stat().st_size
    if kind in ("jsonl", "lines"):
        columns = (TEXT_OF_LINES,) if kind == "lines" else None
        return RecordFile(path, kind, columns, 0, size)
    names, start = _heading(path, kind)
    return RecordFile(path, kind, names, start, size)


def field_value(fields: dict[str, Any], name: str) -> Any:
    """Return a field, or None if it is missing. Dots in a name select nested fields."""
    value: Any = fields.get(name)
    if value is None and "." in name:
        value = fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return value


def text_field(fields: dict[str, Any], name: str) -> str | None:
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
        raise ValueError(f"field {name!r} contains an unpaired surrogate") from None
    return text


def digest(paths: Sequence[InputPath]) -> str:
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


def _heading(path: InputPath, kind: Kind) -> tuple[tuple[str, ...], int]:
    with path.open("rb") as file:
        line = file.readline(_MAX_RECORD_BYTES)
        start = file.tell()
    if b"\r" in line.rstrip(b"\r\n"):
        raise ValueError(
            f"{path}: the first line contains a carriage return (CR): save the file with the line "
            "endings LF or CR LF"
        )
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the first line is not UTF-8: save the file as UTF-8") from error
    names = text.split("\t") if kind == "tsv" else next(_cells([text]), [])
    names = [name.strip() for name in names]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(
            f"{path}: the first line, {shown(text)}, must contain a unique name for every column"
        )
    return tuple(names), start


def _lines(
    file: IO[bytes], name: str, start: int, first: int, last: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in [first, last). A line that crosses `first` is not included."""
    offset = first
    if first > start:
        # The line that crosses `first` belongs to the previous range.
        file.seek(first - 1)
        offset += len(_line(file, name, first)) - 1
    else:
        file.seek(first)
    while offset < last:
        line = _line(file, name, offset)
        if not line:
            return
        yield offset, line
        offset += len(line)


def _line(file: IO[bytes], name: str, offset: int) -> bytes:
    line = file.readline(_MAX_RECORD_BYTES)
    if len(line) == _MAX_RECORD_BYTES:
        raise ValueError(
            f"{name}, byte {offset}: a line is longer than {_MAX_RECORD_BYTES >> 20} MiB: check "
            "that the file contains records"
        )
    return line


def _quoted(lines: Iterator[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """Join lines of a CSV file into records, because quoted cells may contain line breaks."""
    taken: list[tuple[int, bytes]] = []

    def texts() -> Iterator[str]:
        for offset, line in lines:
            taken.append((offset, line))
            yield line.decode("utf-8", "surrogateescape")

    rows = csv.reader(texts())
    record: tuple[int, bytes] | None = None
    while True:
        try:
            row = next(rows, None)
            if row is None and record is not None:
                _check_closed(record[1])
        except csv.Error as error:
            at = taken[0][0] if taken else record[0] if record else 0
            raise ValueError(f"{name}, byte {at}: {error}: check for an unclosed quote") from error
        if record is not None:
            yield record
        if row is None:
            return
        record = taken[0][0], b"".join(line for _, line in taken)
        taken.clear()


def _check_closed(record: bytes) -> None:
    """Raise csv.Error if the last record of a file ends inside quotes, which may be anywhere in the
    file.
    """
    lines = record.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    try:
        list(csv.reader(lines, strict=True))
    except csv.Error as error:
        if "end of data" in str(error):
            raise


def _cells(lines: Sequence[str]) -> Iterator[list[str]]:
    return csv.reader(io.StringIO("\n".join(lines), newline=""))


def _endings() -> str:
    return ", ".join(KINDS)

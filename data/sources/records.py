"""Reads the records of JSONL, CSV, TSV and line-based text files, and the rows of Parquet tables.

A record of a text file is identified by its offset. TSV has no quoting, as its media type
specifies, so each line is a record. CSV is quoted as in RFC 4180, and quoted cells may span several
lines. DuckDB reads Parquet.
"""

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import duckdb

from data.messages import one_line, shown

Kind = Literal["jsonl", "csv", "tsv", "lines"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "lines",
}
_TEXT_OF_LINES = "text"
_MAX_RECORD_BYTES = 4 << 20
_DIGEST_BLOCKS = 16
_DIGEST_BLOCK_BYTES = 1 << 16
_PARQUET = ".parquet"
_AT_ONCE = 256  # rows; images make a row large
_ROW = "file_row_number"
# The columns of a file only. DuckDB would add columns for folders such as `label=cat`.
_FILE = "read_parquet(?, hive_partitioning = false, file_row_number = {})"

csv.field_size_limit(_MAX_RECORD_BYTES)  # the default is 128 KiB, and a record may be one cell

Fields = dict[str, Any]


class Record(NamedTuple):
    """A record that has not been parsed.

    position: its offset in bytes, or its row in Parquet. size: its share of the bytes of the file.
    content: a line, the cells of a CSV record, or the fields of a row.
    """

    position: int
    size: int
    content: Any


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    columns: the names in the first line of a table, or None for JSONL.
    """

    path: Path
    kind: Kind
    columns: tuple[str, ...] | None
    start: int

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """Yield the records, except empty lines. `columns` is for other kinds of files."""
        if self.kind == "csv":
            return self._quoted()
        return (line for line in self._lines() if line.content.strip(b"\r\n"))

    def fields(self, record: Record) -> Fields:
        """Return the fields of a record. Raises ValueError if it is malformed."""
        if self.kind == "csv":
            return self._named(record.content)
        text = record.content.decode("utf-8").rstrip("\r\n")
        if self.kind == "tsv":
            return self._named(text.split("\t"))
        text = text.removeprefix("\ufeff")
        try:
            fields = {_TEXT_OF_LINES: text} if self.kind == "lines" else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON on one line ({one_line(error, 60)})") from error
        if not isinstance(fields, dict):
            raise ValueError("is not a JSON object")
        return fields

    def where(self, offset: int) -> str:
        """Return the file and the number, from 1, of the line that begins at byte `offset`."""
        with self.path.open("rb") as file:
            blocks = (file.read(min(1 << 20, offset - at)) for at in range(0, offset, 1 << 20))
            before = sum(block.count(b"\n") for block in blocks)
        return f"{self.path}, line {before + 1}"

    def _named(self, cells: list[str]) -> Fields:
        assert self.columns is not None
        if len(cells) != len(self.columns):
            raise ValueError(f"has {len(cells)} cells, but the first line has {len(self.columns)}")
        try:
            "".join(cells).encode()
        except UnicodeEncodeError as error:
            raise ValueError("is not UTF-8") from error
        return dict(zip(self.columns, cells, strict=True))

    def _lines(self) -> Iterator[Record]:
        offset = self.start
        with self.path.open("rb") as file:
            file.seek(offset)
            while line := file.readline(_MAX_RECORD_BYTES):
                if len(line) == _MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{self.path}, byte {offset}: a line is longer than "
                        f"{_MAX_RECORD_BYTES >> 20} MiB: check that the file contains records"
                    )
                yield Record(offset, len(line), line)
                offset += len(line)

    def _quoted(self) -> Iterator[Record]:
        """Yield the records of a CSV file. A quoted cell may contain line breaks."""
        taken: list[Record] = []  # the lines of the current record
        ended = False

        def texts() -> Iterator[str]:
            nonlocal ended
            for line in self._lines():
                taken.append(line)
                yield line.content.decode("utf-8", "surrogateescape")
            ended = True
            yield "end"  # a record of its own, unless a quote is open

        try:
            for cells in csv.reader(texts()):
                if ended and taken:
                    raise csv.Error("the file ends inside quotes")
                if cells and not ended:
                    yield Record(taken[0].position, sum(line.size for line in taken), cells)
                taken.clear()
        except csv.Error as error:
            raise ValueError(
                f"{self.path}, byte {taken[0].position if taken else 0}: {error}: check for an "
                "unclosed quote"
            ) from error


class ParquetFile:
    """A table with the methods of a `RecordFile`. A row is identified by its number, from 0.

    Raises ValueError if the file is not Parquet or has a column whose name DuckDB reserves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if _ROW in self.columns:
            raise ValueError(
                f"{path} has a column {_ROW}, which DuckDB reserves: rename the column"
            )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        found = _query(self.path, f"DESCRIBE SELECT * FROM {_FILE.format(False)}")
        return tuple(name for name, *_ in found)

    def has_class_names(self, column: str) -> bool:
        """Return whether the datasets library has stored names for the numbers in a column."""
        query = "SELECT value FROM parquet_kv_metadata(?) WHERE decode(key) = 'huggingface'"
        for (value,) in _query(self.path, query):
            try:
                feature = json.loads(bytes(value))["info"]["features"][column]
                feature = feature.get("feature", feature)  # of a list
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                return True
        return False

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """Yield the rows with the given columns, by default all. Their order does not matter,
        because each has its number.
        """
        columns = columns or self.columns
        query = "SELECT num_rows FROM parquet_file_metadata(?)"
        total, size = int(next(_query(self.path, query))[0]), self.path.stat().st_size
        names = ", ".join('"{}"'.format(name.replace('"', '""')) for name in columns)
        query = f"SELECT {_ROW}, {names} FROM {_FILE.format(True)}"
        for number, *values in _query(self.path, query):
            share = size * (number + 1) // total - size * number // total
            yield Record(number, share, dict(zip(columns, values, strict=True)))

    def fields(self, record: Record) -> Fields:
        fields: Fields = record.content
        return fields

    def where(self, row: int) -> str:
        return f"{self.path}, row {row}"


def _query(path: Path, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query whose parameter is the name of the file."""
    with duckdb.connect(config={"threads": "1"}) as connection:
        # DuckDB reads a name as a glob pattern.
        name = re.sub(r"([*?\[])", r"[\1]", str(path))
        try:
            connection.execute(query, [name])
            while rows := connection.fetchmany(_AT_ONCE):
                yield from rows
        except (duckdb.Error, ValueError, OverflowError) as error:
            raise ValueError(
                f"{path} is not a valid Parquet file ({one_line(error)}): save it again"
            ) from error


AnyFile = RecordFile | ParquetFile


def open_records(path: Path) -> AnyFile:
    """Open a record file. Its extension is its format, and its first line has the columns.

    Raises FileNotFoundError, and ValueError for an unknown extension or a bad first line.
    """
    endings = ", ".join((*KINDS, _PARQUET))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass record files ({endings})")
    if path.suffix.lower() == _PARQUET:
        return ParquetFile(path)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(
            f"{path} has the unsupported extension {path.suffix!r}: unpack it, or use one of "
            f"{endings}"
        )
    if kind in ("jsonl", "lines"):
        return RecordFile(path, kind, (_TEXT_OF_LINES,) if kind == "lines" else None, 0)
    return RecordFile(path, kind, *_heading(path, kind))


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

    In files larger than 1 MiB, only 16 evenly spaced blocks of 64 KiB are read.
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

"""Reads the rows of Parquet tables, with DuckDB."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb

from data.messages import one_line
from data.text.records import Fields, Record

PARQUET = ".parquet"
_AT_ONCE = 256  # rows; images make a row large
_ROW = "file_row_number"
# The columns of a file only. DuckDB would add columns for folders such as `label=cat`.
_FILE = "read_parquet(?, hive_partitioning = false, file_row_number = {})"


class ParquetFile:
    """A table with the methods of a `RecordFile`. A row is identified by its number, from 0.

    Raises FileNotFoundError, or ValueError if the file is not Parquet or has a column whose name
    DuckDB reserves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file: pass a table")
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
            except (ValueError, KeyError, TypeError, RecursionError):
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

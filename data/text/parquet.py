"""Parquet through pyarrow, which is an optional extra: rows become JSONL, to be read by place."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.aside import flush, written_aside

PARQUET = ".parquet"
_ROWS = 10_000


def parquet_columns(path: Path) -> tuple[str, ...]:
    """Names of the columns; FileNotFoundError, or ValueError where it is no Parquet."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: name a table")
    return tuple(_open(path).schema_arrow.names)


def parquet_as_jsonl(path: Path, columns: Sequence[str], out: Path) -> None:
    """Write the named columns of each row as a line of JSON; nothing where `out` stands already."""
    if out.is_file():
        return
    with written_aside(out) as aside:
        with aside.open("wb") as file:
            for batch in _open(path).iter_batches(batch_size=_ROWS, columns=list(columns)):
                for row in batch.to_pylist():
                    line = json.dumps(row, ensure_ascii=False, default=str)
                    file.write(line.encode() + b"\n")
            flush(file)
        aside.replace(out)


def _open(path: Path) -> Any:
    try:
        # Not imported by its name above: without it every other table is read all the same.
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} is Parquet, which needs pyarrow: pip install kway[parquet], or save it as CSV"
        ) from None
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise ValueError(f"{path} is no readable Parquet ({str(error).splitlines()[0]})") from error

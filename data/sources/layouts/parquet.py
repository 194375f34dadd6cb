"""Reads Parquet tables of texts or images, including those of the Hugging Face datasets library.

The rows are copied to JSONL, because a row of Parquet cannot be read on its own. Images in the
table are copied to a second file, and the JSON line of a row contains the location of its image.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data.extras import install_command
from data.files import flush, is_of_file_system, temporary_path
from data.messages import one_line, shown
from data.remote.input_path import InputPath

_ROWS = 10_000
_ROWS_OF_IMAGES = 64  # to limit memory use
BYTES_AT = "\0bytes"  # not the name of a column in practice
_UNLABELED = -1  # how the datasets library labels the rows of an unlabeled split
_MAX_METADATA_BYTES = 64 << 20


def parquet_columns(path: InputPath) -> tuple[str, ...]:
    """Return the column names.

    Raises FileNotFoundError, or ValueError if the file is not Parquet.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass a table")
    return tuple(_open(path).schema_arrow.names)


def class_label_names(path: InputPath, column: str) -> list[str] | None:
    """Return the class names that the datasets library stores for a column of numbers.

    Returns None if there are no names. Raises ValueError for names that are not unique strings.
    """
    content = (_open(path).schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        if len(content) > _MAX_METADATA_BYTES:
            raise ValueError("it is too large")
        feature = json.loads(content)
        for key in ("info", "features", column):
            feature = feature.get(key, {})
        names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: the metadata of the datasets library are damaged ({error}): save the table "
            "again"
        ) from error
    if names is None:
        return None
    valid = isinstance(names, list) and all(isinstance(one, str) and one.strip() for one in names)
    if not valid or len({one.strip() for one in names}) < len(names):
        raise ValueError(
            f"{path}: the class names of column {column!r} are not unique strings: save the table "
            "again"
        )
    return [one.strip() for one in names]


def named_label(label: str, names: Sequence[str]) -> str | None:
    """Return the class of a numbered label, or None for an unlabeled row.

    Raises ValueError if the number has no name.
    """
    try:
        number = int(label)
    except ValueError:
        number = len(names)
    if number == _UNLABELED:
        return None
    if not 0 <= number < len(names):
        raise ValueError(f"has label {shown(label)}, but the table names {len(names):,} classes")
    return names[number]


def parquet_as_jsonl(path: InputPath, columns: Sequence[str], image: str | None, out: Path) -> None:
    """Write the given columns of each row as a line of JSON.

    image: the column that contains images, or None. If it contains bytes, they are written to
    `images_path(out)`. The line then contains their SHA-256 in place of the image, and their
    offset, size and row as BYTES_AT. If it contains only paths, these are unchanged. Raises
    ValueError, with the file and the row, for a value that cannot be read.
    """
    images = images_path(out)
    rows = _ROWS if image is None else _ROWS_OF_IMAGES
    with temporary_path(images) as bytes_path, temporary_path(out) as temporary:
        with temporary.open("wb") as file, bytes_path.open("wb") as bytes_file:
            for number, row in enumerate(_rows(path, columns, rows)):
                if image is not None:
                    _move_image(row, image, number, bytes_file)
                line = json.dumps(row, ensure_ascii=False, default=str)
                file.write(line.encode() + b"\n")
            flush(file)
            flush(bytes_file)
        bytes_path.replace(images)
        temporary.replace(out)  # last, because it marks both files as complete


def images_path(rows: Path) -> Path:
    """Return the file of the images of a table that was copied to `rows`."""
    return rows.with_suffix(".images")


def row_at(rows: Path, offset: int) -> int:
    """Return the number of the row whose line in `rows` begins at byte `offset`."""
    with rows.open("rb") as file:
        return sum(1 for line in iter(file.readline, b"") if file.tell() <= offset)


def read_image(rows: Path, at: Sequence[int]) -> bytes:
    """Return the image at (offset, size, row)."""
    offset, size, _ = at
    with images_path(rows).open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


def _rows(path: InputPath, columns: Sequence[str], at_once: int) -> Iterator[dict[str, Any]]:
    batches = _open(path).iter_batches(batch_size=at_once, columns=list(columns))
    done = 0
    while True:
        with _explained(path, f"row {done} or later"):
            batch = next(batches, None)
        if batch is None:
            return
        yield from _of_batch(path, batch, done)
        done += batch.num_rows


def _of_batch(path: InputPath, batch: Any, done: int) -> list[dict[str, Any]]:
    """Return the rows of a batch that follows `done` rows."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):
        for at in range(batch.num_rows):
            with _explained(path, f"row {done + at}"):
                batch.slice(at, 1).to_pylist()
        raise
    return rows


@contextmanager
def _explained(path: InputPath, where: str) -> Iterator[None]:
    """Turn errors in the content of `path` into ValueError.

    Python cannot represent some values, such as dates after the year 9999 and, without pandas,
    times in nanoseconds.
    """
    try:
        yield
    except (ValueError, OverflowError, OSError, NotImplementedError) as error:
        if is_of_file_system(error):
            raise
        raise ValueError(f"{path}, {where}: {one_line(error)}: correct it") from error


def _move_image(row: dict[str, Any], column: str, number: int, file: IO[bytes]) -> None:
    content = row[column]
    if isinstance(content, dict):  # as in the datasets library: {"bytes": …, "path": …}
        content = content.get("bytes") or content.get("path")
    row[column] = content
    if isinstance(content, bytes):
        row[column] = hashlib.sha256(content).hexdigest() if content else None
        row[BYTES_AT] = [file.tell(), len(content), number]
        file.write(content)


def _open(path: InputPath) -> Any:
    try:
        # Imported here so that other tables can be read without pyarrow.
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} is Parquet, which requires pyarrow: run {install_command('parquet')}, or save "
            "the table as CSV"
        ) from None
    try:
        # A local file is passed by its path, because pyarrow then does not hold the GIL.
        return parquet.ParquetFile(path if isinstance(path, Path) else path.open("rb"))
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        if is_of_file_system(error):
            raise
        raise ValueError(
            f"{path} is not a valid Parquet file ({one_line(error)}): save it again"
        ) from error

"""The first pass over the inputs, which stores a fixed-size reference to each labeled record on
disk.

Several processes read byte ranges in parallel. The result of each range is a separate file, so an
interrupted pass can be resumed. `selection.py` removes duplicates and selects the classes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from data.files import commit
from data.messages import Report
from data.processes import over_jobs
from data.text.records import RecordFile

SPAN_BYTES = 32 << 20
# Keys of counts: the number of damaged records, and a prefix for the location of the first damaged
# record in a span.
DAMAGED = "damaged records"
FIRST_DAMAGED = "first damaged: "
# high, low: the 128-bit hash of the text. label, split: positions in the lists of names that are
# stored with the references.
REFERENCE = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("offset", "<u8"),
        ("file", "<u4"),
        ("length", "<u4"),
        ("label", "<u4"),
        ("split", "<u4"),
    ]
)


class Span(NamedTuple):
    """A byte range of input number `file`."""

    file: int
    first: int
    last: int


def record_spans(records: Sequence[RecordFile], span_bytes: int) -> list[Span]:
    """Return byte ranges that together contain every record of the inputs once."""
    return [
        Span(number, first, last)
        for number, one in enumerate(records)
        for first, last in one.spans(span_bytes)
    ]


class LabeledText(NamedTuple):
    """A record with a label. text: the text as written to the shard. split: the split, or None if
    it is chosen by a hash.
    """

    offset: int
    length: int
    text: str
    label: str
    split: str | None


class RecordReader(Protocol):
    """The interface that the first pass requires of a source. A reader is pickled for worker
    processes.
    """

    def spans(self) -> list[Span]: ...

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        """Yield the labeled records of a span, and count the other records in `counts` by
        reason.
        """


def read_spans(
    reader: RecordReader,
    folder: Path,
    workers: int | None,
    ray: str | None,
    report: Report,
) -> list[Path]:
    """Read every span into `folder`, except spans whose result already exists. `report` counts
    bytes.

    The references are written with the suffix .bin, and then the names and counts with the suffix
    .json, which marks the span as complete. This process writes them, because a Ray worker may be
    on another machine.
    """
    spans = reader.spans()
    paths = [folder / f"span-{number:08d}.json" for number in range(len(spans))]
    missing = [i for i, path in enumerate(paths) if not path.is_file()]
    jobs = [spans[i] for i in missing]
    total = sum(span.last - span.first for span in spans)
    left = sum(span.last - span.first for span in jobs)
    report(total - left, total)
    work = partial(_read_span, reader)
    found = over_jobs(work, jobs, total_bytes=left, workers=workers, ray=ray)
    for i, (references, about) in zip(missing, found, strict=True):
        commit(paths[i].with_suffix(".bin"), references.tobytes())
        commit(paths[i], json.dumps(about).encode())
        left -= spans[i].last - spans[i].first
        report(total - left, total)
    return paths


def _read_span(reader: RecordReader, span: Span) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the references of a span, and its names and counts."""
    labels: dict[str, int] = {}
    splits: dict[str | None, int] = {}
    counts: Counter[str] = Counter()
    rows = []
    for record in reader.labeled_texts(span, counts):
        high, low = text_hash(record.text)
        label = labels.setdefault(record.label, len(labels))
        split = splits.setdefault(record.split, len(splits))
        rows.append((high, low, record.offset, span.file, record.length, label, split))
    about = {"labels": list(labels), "splits": list(splits), "counts": counts}
    return np.array(rows, REFERENCE), about


def text_hash(text: str) -> tuple[int, int]:
    """Return the two halves of a 128-bit hash (BLAKE2b)."""
    whole = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(whole[:8]), int.from_bytes(whole[8:])

"""First pass over the inputs: what of which record is kept, as fixed-size references on disk.

Byte ranges are read by several processes; each leaves one file, so that a killed pass goes on.
`selection.py` chooses between equal texts, and the classes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from data.files import commit
from data.messages import Report
from data.processes import over_jobs
from data.text.records import RecordFile

SPAN_BYTES = 32 << 20
# Counts of damage, and the place of the first of a span, which is counted once.
DAMAGED = "records damaged"
FIRST_DAMAGED = "first damaged: "
# high, low: 128-bit hash of the text; label, split: position in the lists of names beside it.
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
    """Byte ranges that together hold every record of the inputs once."""
    return [
        Span(number, first, last)
        for number, one in enumerate(records)
        for first, last in one.spans(span_bytes)
    ]


class LabeledText(NamedTuple):
    """A record with a label: `text` as it will stand in the shard; `split` None is by hash."""

    offset: int
    length: int
    text: str
    label: str
    split: str | None


class RecordReader(Protocol):
    """What the first pass needs of a source; it is sent to worker processes."""

    def spans(self) -> list[Span]: ...

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        """Records of a span that are kept; what is not is counted, by a line for people."""


def read_spans(
    reader: RecordReader, folder: Path, workers: int | None, report: Report
) -> list[Path]:
    """Read every span into `folder`; those that stand there are not read again. Bytes reported."""
    spans = reader.spans()
    paths = [folder / f"span-{number:08d}.json" for number in range(len(spans))]
    jobs = [
        (reader, span, path) for span, path in zip(spans, paths, strict=True) if not path.is_file()
    ]
    total = sum(span.last - span.first for span in spans)
    left = sum(span.last - span.first for _, span, _ in jobs)
    report(total - left, total)
    for num_bytes in over_jobs(_read_span, jobs, total_bytes=left, workers=workers):
        left -= num_bytes
        report(total - left, total)
    return paths


def _read_span(job: tuple[RecordReader, Span, Path]) -> int:
    """References as `path` with the ending .bin; names and counts as `path`, written last."""
    reader, span, path = job
    labels: dict[str, int] = {}
    splits: dict[str | None, int] = {}
    counts: Counter[str] = Counter()
    rows = []
    for kept in reader.labeled_texts(span, counts):
        high, low = text_hash(kept.text)
        label = labels.setdefault(kept.label, len(labels))
        split = splits.setdefault(kept.split, len(splits))
        rows.append((high, low, kept.offset, span.file, kept.length, label, split))
    commit(path.with_suffix(".bin"), np.array(rows, REFERENCE).tobytes())
    about = {"labels": list(labels), "splits": list(splits), "counts": counts}
    commit(path, json.dumps(about).encode())
    return span.last - span.first


def text_hash(text: str) -> tuple[int, int]:
    """The two halves of a 128-bit hash (BLAKE2b)."""
    whole = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(whole[:8]), int.from_bytes(whole[8:])

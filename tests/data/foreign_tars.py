"""Webdataset tars that kway did not write, and shards that contain bad samples."""

import io
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from data.classes.class_list import ClassInfo
from data.shards.manifest import SourceInfo
from data.shards.writing.writer import write_shards
from data.sources.source import Sample


def png(seed: int, side: int = 20) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return cv2.imencode(".png", noise)[1].tobytes()


def bomb() -> bytes:
    """Return a PNG of a few bytes that decodes to 60,000 x 60,000 pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(999))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


def write_tar(
    path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def images(first: int, count: int, classes: int = 3) -> list[tuple[str, bytes]]:
    """Return the members of `count` samples, each labeled with its number modulo `classes`."""
    members = []
    for number in range(first, first + count):
        members.append((f"{number:05d}.png", png(number)))
        members.append((f"{number:05d}.cls", str(number % classes).encode()))
    return members


class Planted:
    """A source of the given training samples, each a tuple (data, extension, label)."""

    modality = "image"

    def __init__(self, samples: Sequence[tuple[bytes, str, int]], num_classes: int) -> None:
        self.samples = samples
        self.num_classes = num_classes

    def describe(self) -> SourceInfo:
        return SourceInfo(kind="planted")

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=f"class {label}") for label in range(self.num_classes))

    def label_vectors(self) -> None:
        return None

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(len(self.samples))}

    def render(self, task: int) -> Sample:
        data, extension, label = self.samples[task]
        return Sample(f"{task:05d}", data, extension, label)


def planted_shards(
    folder: Path, bad: dict[int, bytes], *, count: int = 30, labels: dict[int, int] | None = None
) -> Path:
    """Write images of 3 classes to shards of 10, some with bad bytes or labels."""
    labels = labels or {}
    samples = [
        (bad.get(number, png(number)), "png", labels.get(number, number % 3))
        for number in range(count)
    ]
    write_shards(Planted(samples, 3), folder, samples_per_shard=10, workers=1)
    return folder

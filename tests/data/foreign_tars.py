"""Webdataset tars that kway did not write, and sources of given samples, which may be bad."""

import gc
import io
import tarfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import webdataset

from data.classes.class_list import ClassInfo
from data.shards.index import Label
from data.shards.writing.writer import write_shards
from data.sources import Sample, Source
from tests.data import bad_images
from tests.noise_images import image


def png(seed: int, side: int = 20) -> bytes:
    return image(seed, side, side)


def bomb() -> bytes:
    """Return a PNG of a few bytes that decodes to 60,000 x 60,000 pixels."""
    return bad_images.png(60_000, 60_000, color=2, rows=1)


def tar_of(
    members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, mode: str = "w"
) -> bytes:
    """Return a tar of (name, bytes). The mode `w:gz` compresses it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tar(
    path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(members, form))


def images(first: int, count: int, classes: int = 3) -> list[tuple[str, bytes]]:
    """Return the members of `count` samples, each labeled with its number modulo `classes`."""
    members = []
    for number in range(first, first + count):
        members.append((f"{number:05d}.png", png(number)))
        members.append((f"{number:05d}.cls", str(number % classes).encode()))
    return members


def read_by_webdataset(
    tars: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Return the samples that webdataset reads."""
    monkeypatch.setattr(webdataset.utils, "enforce_security", True)
    with warnings.catch_warnings():
        # webdataset relies on the garbage collector to close its files.
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        files = [str(tar) for tar in tars]
        found = list(webdataset.WebDataset(files, shardshuffle=False, empty_check=False))
        gc.collect()
    return found


class Planted(Source):
    """A source of the given training samples, each a tuple (data, extension, label or labels)."""

    kind = "planted"
    modality = "image"

    def __init__(self, samples: Sequence[tuple[bytes, str, Label]], num_classes: int) -> None:
        self.samples = samples
        self.num_classes = num_classes

    def parameters(self) -> dict[str, Any]:
        return {}

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=f"class {label}") for label in range(self.num_classes))

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(len(self.samples))}

    def render(self, task: int) -> Sample:
        data, extension, label = self.samples[task]
        return Sample(f"{task:05d}", data, extension, label)


@dataclass(frozen=True)
class Numbers(Source):
    """The first `train` numbers as texts, and three for testing. Each takes `seconds` to render."""

    train: int
    seconds: float = 0.0

    kind = "numbers"
    modality = "text"

    def parameters(self) -> dict[str, Any]:
        return {"train": self.train}

    def classes(self) -> tuple[ClassInfo, ...]:
        return (ClassInfo(name="even"), ClassInfo(name="odd"))

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(self.train), "test": range(self.train, self.train + 3)}

    def render(self, task: int) -> Sample:
        time.sleep(self.seconds)
        return Sample(f"{task:04d}", f"number {task}".encode(), "txt", task % 2)


def set_of(number: int) -> list[int]:
    """Return the set of labels of a sample: some of 3 classes, or none."""
    return [] if number % 5 == 0 else sorted({number % 3, number // 3 % 3})


def planted_shards(
    folder: Path,
    bad: dict[int, bytes],
    *,
    count: int = 30,
    labels: dict[int, Label] | None = None,
    sets: bool = False,
) -> Path:
    """Write images of 3 classes to shards of 10, some with bad bytes or labels. sets: whether the
    samples have sets of labels.
    """
    labels = labels or {}
    samples = [
        (
            bad.get(number, png(number)),
            "png",
            labels.get(number, set_of(number) if sets else number % 3),
        )
        for number in range(count)
    ]
    write_shards(Planted(samples, 3), folder, samples_per_shard=10, workers=1)
    return folder

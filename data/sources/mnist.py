"""MNIST in its published idx files, and datasets with the same layout, such as Fashion-MNIST.

An idx file contains a magic number, the sizes of its axes (big-endian) and bytes (LeCun et al.).
"""

import gzip
import hashlib
import math
import struct
import zlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.option import Argument
from data.sources.input_files import Input, check_folder
from data.sources.pixels import PixelSource
from data.sources.source import STRICT
from data.tars.labels import read_class_names

_STEMS = {"train": "train", "test": "t10k"}
_BYTES = 0x08  # the element type uint8 in the third byte of the magic number


@dataclass(frozen=True, config=STRICT)
class Mnist(PixelSource):
    """MNIST, or a dataset that consists of the same four idx files, such as Fashion-MNIST."""

    kind = "mnist"
    reads = "four idx files, plain or .gz (an 11 MB download for MNIST)"
    held_out = "the t10k files"

    folder: Annotated[
        Input,
        Argument(),
        Field(
            description="folder that contains train-images-idx3-ubyte.gz and the other three files"
        ),
    ]
    names: Input | None = Field(
        default=None, description="file of class names, one per line; default: 0, 1, 2, …"
    )

    def __post_init__(self) -> None:
        check_folder(self.folder, "pass the folder that contains train-images-idx3-ubyte.gz")

    def parameters(self) -> dict[str, Any]:
        content = hashlib.sha256(repr(self.class_names).encode())
        for images, labels in self.arrays.values():
            content.update(repr(images.shape).encode())
            content.update(images.tobytes() + labels.tobytes())
        return {"content": content.hexdigest()[:16]}

    @cached_property
    def class_names(self) -> list[str]:
        number = 1 + max(int(labels.max()) for _, labels in self.arrays.values())
        names = [*map(str, range(number))] if self.names is None else read_class_names(self.names)
        if len(names) < max(2, number):
            raise ValueError(
                f"{self.names or self.folder} has {len(names)} classes, but the largest label is "
                f"{number - 1}: list a name for every label, and at least 2 names"
            )
        return names

    @cached_property
    def arrays(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        arrays = {}
        for split, stem in _STEMS.items():
            images = _read_idx(self.folder, f"{stem}-images", 3)
            labels = _read_idx(self.folder, f"{stem}-labels", 1)
            if len(images) != len(labels) or not images.size:
                raise ValueError(
                    f"{self.folder}: {stem}-images has {len(images):,} images, but {stem}-labels "
                    f"has {len(labels):,} labels: download both again"
                )
            arrays[split] = images, labels
        return arrays


def _read_idx(folder: Path, stem: str, num_axes: int) -> np.ndarray:
    """Read `stem-idxN-ubyte`, or `stem.idxN-ubyte` as written by some unpacking tools, as a uint8
    array.
    """
    names = [f"{stem}{mark}idx{num_axes}-ubyte{end}" for mark in "-." for end in (".gz", "")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {names[1]}, with or without .gz: download it")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}): download it again") from error
    start = 4 + 4 * num_axes
    shape = struct.unpack_from(f">{num_axes}I", content.ljust(start, b"\0"), 4)
    magic = bytes((0, 0, _BYTES, num_axes))
    if content[:4] != magic or len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path} is not a complete idx file of bytes with {num_axes} axes: download it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

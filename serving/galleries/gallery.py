"""Galleries on disk. Rows (items with their features and thumbnails) are written as a stream and
memory-mapped.

gallery.json           see `GalleryInfo`; includes the size and SHA-256 of the other files
features.safetensors   float32 [items, dim]
items.jsonl            one item per line, see `Item`
offsets.safetensors    uint64 [items + 1, 2]: start offsets of each item's line and thumbnail
thumbnails.bin         concatenated JPEGs; empty without thumbnails
index.faiss            the approximate index, if there is one (`serving/galleries/index.py`)
unreadable.jsonl       items that could not be read, with the reasons
"""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from data.files import sha256_of
from data.messages import kway_command
from heads.logit_maps import inverse_norms_of
from serving.api_error import first_of
from serving.galleries.index import DAMAGE_REMEDY, INDEX, ApproximateIndex, IndexInfo
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import BACKBONE, ENCODER, ONNX, TOKENIZER, Reads, Spec, read_manifest

Kind = Literal["<f4", "<u8"]
_DTYPES = {"<f4": "F32", "<u8": "U64"}
_HEADER_BYTES = 128
FORMAT_VERSION = 2  # 2: with an index
GALLERY = "gallery.json"
FEATURES, ITEMS, OFFSETS = "features.safetensors", "items.jsonl", "offsets.safetensors"
THUMBNAILS, UNREADABLE = "thumbnails.bin", "unreadable.jsonl"
DATA_FILES = (FEATURES, ITEMS, OFFSETS, THUMBNAILS, UNREADABLE)

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileInfo(Spec):
    bytes: int = Field(ge=0)
    sha256: Sha256


class GalleryInfo(Spec):
    """The contents of `gallery.json`."""

    # Earlier versions wrote "pictures".
    reads: Annotated[Reads, BeforeValidator(lambda v: "images" if v == "pictures" else v)]
    backbone: Sha256 = Field(
        description="`features_identity` of the bundle that computed the features"
    )
    source: str = Field(description="path of the indexed folder or text file")
    dim: int = Field(gt=0)
    thumbnails: bool
    format_version: Literal[1, 2] = 1
    num_items: int = Field(gt=0)
    unreadable: int = Field(ge=0, description="number of files or lines that could not be read")
    index: IndexInfo | None = None
    files: dict[str, FileInfo]

    @model_validator(mode="after")
    def _complete(self) -> "GalleryInfo":
        expected = DATA_FILES if self.index is None else (*DATA_FILES, INDEX)
        if set(self.files) != set(expected):
            raise ValueError(f"files must list {', '.join(expected)}")
        return self


def read_info(path: Path) -> GalleryInfo:
    """Read the description of the gallery at `path` and check the sizes of its files.

    Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if it is
    damaged or has a newer format.
    """
    file = path / GALLERY
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is not a gallery: {GALLERY} is missing. Create one with kway index"
        )
    try:
        info = GalleryInfo.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{file} is damaged or of a newer version of kway ({first_of(error.errors())}): "
            f"{DAMAGE_REMEDY}, or update kway"
        ) from error
    for name, expected in info.files.items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {DAMAGE_REMEDY}")
        if (size := file.stat().st_size) != expected.bytes:
            raise ValueError(
                f"{file} has {size} bytes instead of {expected.bytes}: {DAMAGE_REMEDY}"
            )
    return info


def features_identity(bundle: Bundle) -> str:
    """Return the SHA-256 of every setting and file that affects the features of a bundle.

    Class weights, thresholds and names are excluded, so a gallery remains valid for other heads.
    """
    checksums = {name: file.sha256 for name, file in read_manifest(bundle.path).files.items()}
    spec = bundle.spec
    encoder: dict[str, Any]
    if spec.backbone is not None:
        encoder = spec.backbone.model_dump(mode="json")
    else:
        encoder = json.loads((bundle.path / ENCODER / "config.json").read_bytes())
        encoder.pop("transformers_version", None)  # recorded at export; does not affect features
    identity = {
        "weights": checksums[BACKBONE],
        "encoder": encoder,
        "tokenizer": {
            name: digest for name, digest in checksums.items() if name.startswith(f"{TOKENIZER}/")
        },
        "pooling": spec.pooling,
        # Omit defaults, so that settings added in later versions do not change the identity.
        "image": spec.image and spec.image.model_dump(mode="json", exclude_defaults=True),
        "text": spec.text and spec.text.model_dump(mode="json", exclude_defaults=True),
    }
    # In float32, all engines compute the same features.
    if spec.precision != "float32":
        identity |= {"precision": spec.precision, "quantized": checksums.get(ONNX)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class OtherBackboneError(ValueError):
    """The features of a gallery were computed by another backbone."""


class Item(NamedTuple):
    """An item of a gallery: its name in the collection and, for a text, the text that the gallery
    displays, possibly truncated."""

    name: str
    text: str | None = None


def item_line(item: Item) -> bytes:
    """Serialize an item as one line of ASCII, including the newline. The name may contain line
    breaks and bytes that are not UTF-8."""
    # Earlier versions stored the size, the time and the offset of the item between the two.
    fields = (item.name, 0, 0) if item.text is None else (item.name, 0, 0, 0, item.text)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def parse_item(line: bytes) -> Item:
    """Inverse of `item_line`. Raises ValueError for any other line."""
    match json.loads(line):
        case [str(name), int(), int(), *rest]:
            return Item(name, rest[1] if len(rest) > 1 else None)
    raise ValueError(f"{line[:80]!r} is not an item")


def shown_name(name: str) -> str:
    """Escape a name for JSON: bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Row(NamedTuple):
    """An item with its features, float32 [dim], and its thumbnail, a JPEG or empty bytes."""

    item: Item
    features: np.ndarray
    thumbnail: bytes


class Gallery:
    """An open gallery. Thread-safe. It continues to use its original files if the folder is
    replaced. `features` are float32 [num_items, dim]."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if
        it is damaged, has a newer format or contains features from a different backbone."""
        self.info = read_info(path)
        if (self.info.backbone, self.info.dim) != (features_identity(bundle), bundle.spec.dim):
            raise OtherBackboneError(
                f"{path} was created with a different backbone, precision or preprocessing than "
                f"{bundle.path}: create a new gallery with "
                f"{kway_command('index', bundle.path, self.info.source, '-o', 'GALLERY')}"
            )
        self.path, self.num_items = path, self.info.num_items
        shapes = (self.num_items, self.info.dim), (self.num_items + 1, 2)
        self.features = map_matrix(path / FEATURES, "<f4", shapes[0])
        self._offsets = map_matrix(path / OFFSETS, "<u8", shapes[1])
        self._lines, self._thumbnails = (_mapped(path / name) for name in (ITEMS, THUMBNAILS))
        self.index: ApproximateIndex | None = None
        if self.info.index is not None:
            self.index = ApproximateIndex(path / INDEX, shapes[0], self.info.index.num_probes)

    def verify(self) -> None:
        """Verify the checksums of all files. Raises ValueError at the first mismatch."""
        for name, expected in self.info.files.items():
            if sha256_of(self.path / name) != expected.sha256:
                raise ValueError(f"{self.path / name} does not match its checksum: {DAMAGE_REMEDY}")

    def item(self, index: int) -> Item:
        return parse_item(self._read(self._lines, index, 0))

    def thumbnail(self, index: int) -> bytes:
        """Return the item's thumbnail as a JPEG, or empty bytes if there are no thumbnails."""
        return self._read(self._thumbnails, index, 1)

    def _read(self, data: np.ndarray, index: int, column: int) -> bytes:
        assert 0 <= index < self.num_items, index
        begin, end = self._offsets[index : index + 2, column].tolist()
        if not begin <= end <= len(data):
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {DAMAGE_REMEDY}")
        return data[begin:end].tobytes()

    @cached_property
    def inverse_norms(self) -> np.ndarray:
        """The inverse norms of the features, float32 [num_items], which cosines are multiplied
        by."""
        return inverse_norms_of(self.features)

    def id_of(self, index: int) -> str:
        """Return the id of an item, which contains a hash of its name. If the gallery is built
        again, an id that belongs to another item is not valid any more."""
        name = os.fsencode(self.item(index).name)
        return f"{index}.{hashlib.blake2b(name, digest_size=4).hexdigest()}"

    def index_of(self, item: str) -> int | None:
        """Return the index of the item with this index or id, or None if there is no such item."""
        index = int(item.partition(".")[0])
        is_known = index < self.num_items and item in (str(index), self.id_of(index))
        return index if is_known else None


class RowWriter:
    """Writes the rows of a gallery to a folder. Memory use does not depend on their number."""

    def __init__(self, path: Path, dim: int) -> None:
        self.num_rows, self._dim = 0, dim
        self._ends = np.zeros(2, "<u8")
        names = (FEATURES, ITEMS, OFFSETS, THUMBNAILS)
        self._files = [(path / name).open("xb") for name in names]
        self._features, self._lines, self._offsets, self._thumbnails = self._files
        self._features.write(bytes(_HEADER_BYTES))
        self._offsets.write(bytes(_HEADER_BYTES) + self._ends.tobytes())

    def add(self, row: Row) -> None:
        self._features.write(row.features.astype("<f4", copy=False).tobytes())
        self._ends[0] += self._lines.write(item_line(row.item))
        self._ends[1] += self._thumbnails.write(row.thumbnail)
        self._offsets.write(self._ends.tobytes())
        self.num_rows += 1

    def close(self) -> None:
        """Write the headers, which state the number of rows."""
        self._features.seek(0)
        self._features.write(matrix_header("<f4", (self.num_rows, self._dim)))
        self._offsets.seek(0)
        self._offsets.write(matrix_header("<u8", (self.num_rows + 1, 2)))
        for file in self._files:
            file.close()


def matrix_header(kind: Kind, shape: tuple[int, int]) -> bytes:
    """Return the header of a safetensors file with a single matrix. The rows follow the header, so
    that they can be written as a stream. Its length is the same for all shapes."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    entry = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({"matrix": entry}, separators=(",", ":")).encode()
    # A multiple of 64 bytes, which aligns the rows for vector instructions.
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(_HEADER_BYTES - 8)


def map_matrix(path: Path, kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """Memory-map a matrix read-only. All processes on the machine share the memory. Raises
    ValueError if the file does not contain this matrix."""
    data, size = _mapped(path), shape[0] * shape[1] * np.dtype(kind).itemsize
    header = matrix_header(kind, shape)
    if data[:_HEADER_BYTES].tobytes() != header or len(data) != _HEADER_BYTES + size:
        raise ValueError(
            f"{path} does not contain a matrix of type {_DTYPES[kind]} and shape {list(shape)}: "
            f"{DAMAGE_REMEDY}"
        )
    return data[_HEADER_BYTES:].view(kind).reshape(shape)


def _mapped(path: Path) -> np.ndarray:
    """Map the bytes of a file, which may be empty."""
    with path.open("rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, np.uint8) if is_empty else np.memmap(file, np.uint8, "r")

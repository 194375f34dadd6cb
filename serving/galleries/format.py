"""The gallery format: the files in a gallery folder.

gallery.json           see `GalleryInfo`; includes the size and SHA-256 of the other files
features.safetensors   float32 [items, dim]
items.jsonl            one item per line, see `Item`
offsets.safetensors    uint64 [items + 1, 2]: start offsets of each item's line and thumbnail
thumbnails.bin         concatenated JPEGs; empty without thumbnails
unreadable.jsonl       items that could not be read, with the reasons
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from data.messages import kway_command
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import BACKBONE, ENCODER, ONNX, TOKENIZER, Reads, Spec, read_manifest

FORMAT_VERSION = 2  # 2: with an approximate index, which this version does not use
GALLERY = "gallery.json"
FEATURES, ITEMS, OFFSETS = "features.safetensors", "items.jsonl", "offsets.safetensors"
THUMBNAILS, UNREADABLE = "thumbnails.bin", "unreadable.jsonl"
DAMAGE_REMEDY = "copy the gallery again, or remove it and index again"
DATA_FILES = (FEATURES, ITEMS, OFFSETS, THUMBNAILS, UNREADABLE)
_OLD_INDEX = "index.faiss"

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
    index: dict[str, Any] | None = Field(None, description="approximate index of earlier versions")
    files: dict[str, FileInfo]

    @model_validator(mode="after")
    def _complete(self) -> "GalleryInfo":
        if set(self.files) - {_OLD_INDEX} != set(DATA_FILES):
            raise ValueError(f"files must list {', '.join(DATA_FILES)}")
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
    text = file.read_bytes()
    try:
        version = json.loads(text).get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): {DAMAGE_REMEDY}") from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has gallery format {version}, but this version of kway only reads formats up "
            f"to {FORMAT_VERSION}: update kway"
        )
    try:
        info = GalleryInfo.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise ValueError(f"{file}: {where}: {first['msg']}") from error
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


def check_same_backbone(path: Path, found: GalleryInfo, bundle: Bundle) -> None:
    """Raise OtherBackboneError if the features at `path` were not computed by `bundle`'s
    backbone."""
    if (found.backbone, found.dim) != (features_identity(bundle), bundle.spec.dim):
        raise OtherBackboneError(
            f"{path} was created with a different backbone, precision or preprocessing than "
            f"{bundle.path}: create a new gallery with "
            f"{kway_command('index', bundle.path, found.source, '-o', 'GALLERY')}"
        )


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

"""What lies in a bundle's folder, and `bundle.json`: the specification and each file's checksum."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from data.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from trainer.bundle.class_list import INDEX, LINES
from trainer.bundle.spec import BundleSpec, Spec
from trainer.bundle.thresholds import FILE as THRESHOLDS

# Format 2 lacks the validation counts of thresholds, which are then unknown. Formats 2 and 3 lack
# the logit map, which is then `dot`.
FORMAT_VERSION, _OLDEST_VERSION = 4, 2
SPEC, CARD = "bundle.json", "MODEL_CARD.md"
BACKBONE, WEIGHTS, ENCODER = "backbone.safetensors", "class_weights.safetensors", "encoder"
TOKENIZER, ONNX = "tokenizer", "backbone.onnx"
TENSOR = "weight"  # the name of the one in WEIGHTS
_REQUIRED = (BACKBONE, WEIGHTS, CARD, LINES, INDEX)
_ENCODER_CONFIG = f"{ENCODER}/config.json"
_OF_TEXTS = (f"{TOKENIZER}/{TOKENIZER_FILE}", f"{TOKENIZER}/{CONFIG_FILE}")


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ValueError(f"file name {name!r} points outside the bundle")
    return name


class FileEntry(Spec):
    """A file of the bundle."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(Spec):
    """`bundle.json` as it lies on disk."""

    format_version: Literal[2, 3, 4] = 4
    model: BundleSpec
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]

    @model_validator(mode="after")
    def _complete(self) -> "Manifest":
        of_texts = () if self.model.text is None else _OF_TEXTS
        of_recalls = (THRESHOLDS,) if self.model.recalls else ()
        of_encoder = (_ENCODER_CONFIG,) if self.model.backbone is None else ()
        needed = (*_REQUIRED, *of_encoder, *of_texts, *of_recalls)
        missing = [name for name in needed if name not in self.files]
        if missing:
            raise ValueError(f"files does not name {missing[0]}")
        return self


def read_manifest(path: Path) -> Manifest:
    """`bundle.json` of the folder `path`.

    Raises FileNotFoundError where there is none, ValueError where it is damaged or of another
    format.
    """
    file = path / SPEC
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no bundle: it has no {SPEC}; make one by kway export")
    text = file.read_bytes()
    try:
        version = json.loads(text).get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): export or copy the bundle again") from error
    if isinstance(version, int) and not _OLDEST_VERSION <= version <= FORMAT_VERSION:
        remedy = "update kway" if version > FORMAT_VERSION else "export the run again"
        raise ValueError(
            f"{path} is a bundle of format {version} and this kway reads {_OLDEST_VERSION} to "
            f"{FORMAT_VERSION}: {remedy}"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{file}: {where}: {first['msg']}") from error


def sha256_of(file: Path) -> str:
    """The checksum of a whole file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

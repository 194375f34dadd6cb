"""The manifest of a checkpoint: the digests of its files and a digest of the manifest itself."""

import hashlib
import json
import stat
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from trainer.checkpoints.folders import mode_of

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
SEPARATOR = " on "  # in `Best.measure`
_MAX_BYTES = 64 * 2**20  # enough for 400,000 ranks at about 150 bytes each

_FileName = Annotated[
    str, StringConstraints(pattern=r"^(state\.json|tensors-\d{5,}-of-\d{5,}\.safetensors)$")
]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileDigest(_Strict):
    """The expected size and SHA-256 of a file."""

    bytes: int = Field(ge=0)
    sha256: _Sha256


class Best(_Strict):
    """The result of the evaluation at a checkpoint's step.

    `measure` is the name of the measure and what it was computed on, such as `top1 on test
    0123456789abcdef`. Checkpoints of earlier versions store only the name.
    """

    measure: str
    value: float


class Manifest(_Strict):
    """The step, the number of ranks that wrote it, the evaluation result, and the digests of all
    other files by name."""

    format_version: int = FORMAT_VERSION
    step: int = Field(ge=0)
    world_size: int = Field(gt=0)
    best: Best | None
    files: dict[_FileName, FileDigest]
    sha256: _Sha256 | None = None  # of the other fields, in a file

    def render(self) -> bytes:
        """Return the manifest file: the content and its SHA-256, in canonical form, so that the
        same content always gives the same bytes.
        """
        content = self.model_dump(exclude={"sha256"})
        compact = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(compact).hexdigest()
        return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


class _Versioned(BaseModel):
    model_config = ConfigDict(strict=True)
    format_version: int


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises ValueError if it is missing or altered."""
    name = f"checkpoint {folder}: {MANIFEST_FILE}"
    path = folder / MANIFEST_FILE
    if not stat.S_ISREG(mode_of(path) or 0):
        raise ValueError(f"{name} is missing; delete the folder")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{name} is unreadable: it is larger than {_MAX_BYTES} bytes")
    raw = path.read_bytes()
    try:
        version = _Versioned.model_validate_json(raw).format_version
        if version != FORMAT_VERSION:
            fix = "update kway" if version > FORMAT_VERSION else "use a new run folder"
            raise ValueError(
                f"checkpoint {folder} has format {version}, but this version of kway reads format "
                f"{FORMAT_VERSION}: {fix}"
            )
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip().replace("\n", " ")
        raise ValueError(f"{name} is unreadable: {reason}; delete the folder") from None
    # Compare the canonical bytes, which also rejects duplicate keys and a wrong digest.
    if manifest.render() != raw:
        raise ValueError(
            f"{name} was altered after it was written (SHA-256 differs); delete the folder"
        )
    return manifest

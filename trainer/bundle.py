"""The exported model: a folder with all that serving needs, and nothing in it is a pickle.

bundle.json                 what it is: preprocessing, classes, loss, thresholds, checksums
encoder/config.json         the encoder's transformers configuration
backbone.safetensors        its weights
class_weights.safetensors   float32 [classes, dim (+ 1: the bias)], one row read at a time
tokenizer/                  where the model reads texts: files that AutoTokenizer opens
MODEL_CARD.md

What bundle.json says is `trainer/bundle_spec.py`.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor

from data.tokens.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer, open_tokenizer
from heads.scores import score
from trainer.backbone import Backbone, build_backbone
from trainer.bundle_spec import BundleSpec, Spec
from trainer.class_names import ClassNames
from trainer.config import BackboneConfig
from trainer.row_file import RowFile, write_rows

FORMAT_VERSION = 1
_SPEC, _CARD = "bundle.json", "MODEL_CARD.md"
_BACKBONE, _WEIGHTS, _ENCODER = "backbone.safetensors", "class_weights.safetensors", "encoder"
_REQUIRED = (_BACKBONE, _WEIGHTS, f"{_ENCODER}/config.json", _CARD)
_TOKENIZER = "tokenizer"
_OF_TEXTS = (f"{_TOKENIZER}/{TOKENIZER_FILE}", f"{_TOKENIZER}/{CONFIG_FILE}")
_TENSOR = "weight"

ThresholdSource = Literal["class", "pooled"]


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ValueError(f"file name {name!r} points outside the bundle")
    return name


class _File(Spec):
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(Spec):
    """`bundle.json` as it lies on disk."""

    format_version: Literal[1] = 1
    model: BundleSpec
    files: dict[Annotated[str, AfterValidator(_inside)], _File]

    @model_validator(mode="after")
    def _complete(self) -> "_Manifest":
        needed = _REQUIRED if self.model.text is None else _REQUIRED + _OF_TEXTS
        missing = [name for name in needed if name not in self.files]
        if missing:
            raise ValueError(f"files does not name {missing[0]}")
        return self


# ---------------------------------------------------------------------------- write


def write_bundle(
    path: Path,
    *,
    backbone: Backbone,
    spec: BundleSpec,
    weight_blocks: Iterable[Tensor],
    model_card: str,
    tokenizer: Tokenizer | None = None,
    force: bool = False,
) -> None:
    """Write the bundle folder `path`, whole or not at all.

    `weight_blocks` are rows [n, dim (+ 1)] in class-list order; only one is held at a time.
    `tokenizer` belongs to a model of texts. Raises ValueError when `path` exists and `force` is
    off, or when shapes do not fit.
    """
    assert (tokenizer is None) == (spec.text is None), "a model of texts, and no other, has one"
    if path.exists() and not force:
        raise ValueError(f"{path} exists already: remove it, name another, or give --force")
    if backbone.dim != spec.dim:
        raise ValueError(f"the backbone gives {backbone.dim} features, the bundle says {spec.dim}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        write_rows(
            aside / _WEIGHTS,
            weight_blocks,
            name=_TENSOR,
            num_rows=len(spec.classes),
            width=spec.width,
        )
        save_model(backbone, str(aside / _BACKBONE))
        backbone.settings.save_pretrained(aside / _ENCODER)
        if tokenizer is not None:
            tokenizer.save(aside / _TOKENIZER)
        (aside / _CARD).write_text(model_card, encoding="utf-8")
        manifest = _Manifest(model=spec, files=_describe_files(aside))
        (aside / _SPEC).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        _make_lasting(aside)
        _put_in_place(aside, path, force=force)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _describe_files(folder: Path) -> dict[str, _File]:
    return {
        file.relative_to(folder).as_posix(): _File(bytes=file.stat().st_size, sha256=_sha256(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _make_lasting(folder: Path) -> None:
    """Bring every file to the disk and let other users read it: safetensors writes 0600."""
    for entry in [*folder.rglob("*"), folder]:
        entry.chmod(0o755 if entry.is_dir() else 0o644)
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(aside: Path, path: Path, *, force: bool) -> None:
    if force and path.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-old-", dir=path.parent))
        os.rename(path, old / path.name)
        os.rename(aside, path)
        shutil.rmtree(old)
    else:
        os.rename(aside, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------- read


class Bundle:
    """An opened bundle. The class weights stay on disk; ask for the rows you need."""

    def __init__(self, path: Path, manifest: _Manifest) -> None:
        self.path = path
        self.spec = manifest.model
        self.names = ClassNames([entry.name for entry in self.spec.classes])
        self._files = manifest.files
        self._rows = RowFile(
            path / _WEIGHTS, name=_TENSOR, num_rows=len(self.names), width=self.spec.width
        )

    @classmethod
    def open(cls, path: Path) -> "Bundle":
        """Open the bundle folder `path`, after a check of its description, files and sizes.

        Raises FileNotFoundError when it, or a file of it, is missing, and ValueError when it is
        damaged or of a newer format. Checksums are `verify`'s: they read everything.
        """
        manifest = _read_manifest(path)
        for name, expected in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise FileNotFoundError(f"{path} lacks {name}: export or copy the bundle again")
            if file.stat().st_size != expected.bytes:
                raise ValueError(
                    f"{file} has {file.stat().st_size} bytes instead of {expected.bytes}: "
                    "export or copy the bundle again"
                )
        return cls(path, manifest)

    def close(self) -> None:
        """Close the file of class weights."""
        self._rows.close()

    def __enter__(self) -> "Bundle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def verify(self, *, class_weights: bool = True) -> None:
        """Read every file and compare its checksum; ValueError names the first that differs.

        Without `class_weights` their file, by far the largest where classes are many, is not read.
        """
        for name, expected in self._files.items():
            if name == _WEIGHTS and not class_weights:
                continue
            if _sha256(self.path / name) != expected.sha256:
                raise ValueError(
                    f"{self.path / name} does not match its checksum: copy the bundle again"
                )

    def class_id(self, name_or_id: str | int) -> int:
        """The id of a class by its exact name, by its id, or by "#" and its id.

        Raises ValueError for an unknown class, with the nearest names.
        """
        return self.names.id_of(name_or_id)

    def rows(self, class_ids: Sequence[int]) -> Tensor:
        """Class ids -> their rows, float32 [n, dim (+ 1: the bias)], read from disk."""
        return self._rows.read(class_ids)

    def scores(self, features: Tensor, class_ids: Sequence[int]) -> Tensor:
        """Features [B, dim] -> scores [B, n] of the classes, which thresholds are compared with."""
        loss = self.spec.loss
        return score(loss.score, logits_of(features, self.rows(class_ids)), eps=loss.eps)

    def threshold(
        self, class_id: int, recall: float
    ) -> tuple[float | None, ThresholdSource | None]:
        """The score that reaches `recall`, and whose it is: the class's own or the pooled one.

        (None, None) when validation had no positives at all. Raises ValueError for a recall that
        the bundle holds no thresholds for.
        """
        held = self.spec.thresholds.recalls if self.spec.thresholds is not None else ()
        for entry in held:
            if abs(entry.recall - recall) < 1e-9:
                value = entry.per_class[class_id]
                if value is not None:
                    return value, "class"
                return entry.pooled, None if entry.pooled is None else "pooled"
        known = ", ".join(f"{entry.recall:g}" for entry in held) or "none"
        raise ValueError(
            f"no thresholds for recall {recall:g}; this bundle holds: {known}. Give one of these, "
            "or a threshold"
        )

    def load_backbone(self) -> Backbone:
        """The backbone with its trained weights, in evaluation mode, on the CPU."""
        config = BackboneConfig(name=str(self.path / _ENCODER), pooling=self.spec.pooling)
        with torch.random.fork_rng(devices=[]):  # the random weights are replaced at once
            backbone = build_backbone(config, image=self.spec.image)
        file = self.path / _BACKBONE
        try:
            load_model(backbone, str(file), strict=True)
        except (RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} does not fit encoder/config.json: {reason}") from error
        return backbone.eval().requires_grad_(False)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of a model of texts, which cuts them where training did."""
        assert self.spec.text is not None, "a model of pictures has no tokenizer"
        folder = self.path / _TOKENIZER
        return open_tokenizer(str(folder), max_length=self.spec.text.max_length)


def logits_of(features: Tensor, rows: Tensor) -> Tensor:
    """Features [B, dim] and rows [n, dim (+ 1: the bias)] -> logits [B, n]."""
    dim = features.shape[1]
    assert rows.shape[1] in (dim, dim + 1)
    bias = rows[:, dim] if rows.shape[1] > dim else None
    return torch.nn.functional.linear(features, rows[:, :dim], bias)


def _read_manifest(path: Path) -> _Manifest:
    file = path / _SPEC
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no bundle: it has no {_SPEC}; make one by kway export")
    text = file.read_bytes()
    try:
        version = json.loads(text).get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): export or copy the bundle again") from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path} is a bundle of format {version} and this kway reads up to {FORMAT_VERSION}: "
            "update kway"
        )
    try:
        return _Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{file}: {where}: {first['msg']}") from error

"""Writes a bundle atomically. The files are synced to disk and readable by all users."""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import Tensor

from data.classes.class_list import ClassInfo
from data.files import published_folder, sha256_of
from data.text.tokenizer import Tokenizer
from trainer.backbone.backbone import Backbone
from trainer.backbone.config import BackboneOptions, ImportedBackbone, Precision
from trainer.bundle.class_list import open_classes, write_classes
from trainer.bundle.row_file import write_rows
from trainer.bundle.spec import (
    BACKBONE,
    CARD,
    CLASSES,
    ENCODER,
    LINES,
    ONNX,
    SPEC,
    TENSOR,
    THRESHOLDS,
    TOKENIZER,
    WEIGHTS,
    BackboneSpec,
    BundleManifest,
    BundleSpec,
    FileEntry,
    read_manifest,
)
from trainer.bundle.threshold_file import ClassThresholds
from trainer.imports import source_version


def write_bundle(
    path: Path,
    *,
    backbone: Backbone,
    spec: BundleSpec,
    classes: Iterable[ClassInfo],
    thresholds: ClassThresholds | None,
    weight_blocks: Iterable[Tensor],
    model_card: str,
    tokenizer: Tokenizer | None = None,
    write_onnx: Callable[[Path], None] | None = None,
    check: Callable[[Path], None] | None = None,
    force: bool = False,
) -> None:
    """Write the bundle folder `path` atomically: either completely or not at all.

    `weight_blocks` are rows [n, dim (+ 1)] in class-list order; only one block is in memory at a
    time. Text models require a `tokenizer`. `write_onnx`, if given, must write the backbone in ONNX
    format to the path passed to it. `check`, if given, is called with a folder that contains the
    complete bundle; if it raises an error, the bundle is not published. Raises ValueError if `path`
    exists and `force` is false, or if shapes do not match.
    """
    assert (tokenizer is None) == (spec.text is None), "text models have a tokenizer, others do not"
    assert spec.recalls == (() if thresholds is None else tuple(thresholds.recalls))
    if path.exists() and not force:
        raise ValueError(
            f"{path} already exists: remove it, choose another path, or replace it with --force"
        )
    if backbone.dim != spec.dim:
        raise ValueError(f"the backbone has dim {backbone.dim}, but the bundle has dim {spec.dim}")
    with published_folder(path, replace=force) as folder:
        num_classes = write_classes(folder, classes)
        if num_classes != spec.num_classes:
            raise ValueError(f"received {num_classes} classes, expected {spec.num_classes}")
        if thresholds is not None:
            thresholds.write(folder, num_classes)
        write_rows(
            folder / WEIGHTS,
            weight_blocks,
            name=TENSOR,
            num_rows=spec.num_classes,
            width=spec.width,
        )
        save_model(backbone, str(folder / BACKBONE))
        if spec.backbone is None:
            backbone.settings.save_pretrained(folder / ENCODER)
        if tokenizer is not None:
            tokenizer.save(folder / TOKENIZER)
        if write_onnx is not None:
            write_onnx(folder / ONNX)
        (folder / CARD).write_text(model_card, encoding="utf-8")
        _write_manifest(folder, BundleManifest(model=spec, files=_describe_files(folder)))
        if check is not None:
            check(folder)


def backbone_spec(config: BackboneOptions) -> BackboneSpec | None:
    """Return the specification of an imported backbone, or None for other backbones."""
    if not isinstance(config, ImportedBackbone):
        return None
    options = config.model_dump(mode="json", exclude=set(BackboneOptions.model_fields) | {"kind"})
    return BackboneSpec(kind=config.kind, options=options, source=source_version(config.kind))


def rewrite_bundle(
    path: Path,
    out: Path,
    *,
    thresholds: ClassThresholds,
    model_card: str,
    precision: Precision | None = None,
    onnx: Path | None = None,
) -> None:
    """Write the bundle `path` with other thresholds and another model card to `out`, atomically.

    With a `precision`, the backbone of `out` runs in it, and `out` contains the ONNX backbone
    `onnx` instead of that of `path`. Unchanged files are hard links if `out` is on the same file
    system. `out` replaces an existing bundle.
    """
    manifest = read_manifest(path)
    changes: dict[str, Any] = {"recalls": tuple(thresholds.recalls)}
    kept = manifest.files.keys() - {CARD, THRESHOLDS}
    if precision is not None:
        changes["precision"] = precision
        kept -= {ONNX}
    model = manifest.model.model_copy(update=changes)
    if LINES in manifest.files:  # formats 2 to 5
        kept -= {CLASSES, LINES}
    with published_folder(out, replace=True) as folder:
        if CLASSES not in kept:
            write_classes(folder, open_classes(path, model.num_classes, manifest.files))
        thresholds.write(folder, model.num_classes)
        (folder / CARD).write_text(model_card, encoding="utf-8")
        if onnx is not None:
            shutil.copyfile(onnx, folder / ONNX)
        files = {name: manifest.files[name] for name in kept} | _describe_files(folder)
        for name in kept:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path / name, folder / name)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(path / name, folder / name)
        _write_manifest(folder, BundleManifest(model=model, files=dict(sorted(files.items()))))


def _write_manifest(folder: Path, manifest: BundleManifest) -> None:
    """Write `bundle.json`. Keys that older versions reject are omitted if they have their
    defaults.
    """
    model = manifest.model
    unused: dict[str, Any] = {} if model.backbone is not None else {"backbone": True}
    if model.precision == "float32":
        unused["precision"] = True
    if model.image is not None:
        added = {"interpolation", "keep_aspect", "crop_offset"}
        unused["image"] = added - model.image.model_dump(exclude_defaults=True).keys()
    text = manifest.model_dump_json(indent=1, exclude={"model": unused})
    (folder / SPEC).write_text(f"{text}\n", encoding="utf-8")


def _describe_files(folder: Path) -> dict[str, FileEntry]:
    return {
        file.relative_to(folder).as_posix(): FileEntry(
            bytes=file.stat().st_size, sha256=sha256_of(file)
        )
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }

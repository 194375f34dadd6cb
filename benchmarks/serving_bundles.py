"""Bundles for serving benchmarks: random networks with any number of classes.

Class weights can be stored in sparse files that have the full length but contain random rows only
for the classes that are queried. This way, the weights of 2^24 classes with ResNet-50 (137 GB) fit
on any disk. `pread` takes the same kernel path for sparse and regular files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.files import sha256_of
from data.images.config import ImageConfig
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.onnx_backbone import write_onnx
from trainer.bundle.class_list import write_classes
from trainer.bundle.row_file import header_of
from trainer.bundle.spec import (
    SPEC,
    TENSOR,
    WEIGHTS,
    BundleSpec,
    ClassEntry,
    LossSpec,
    RecallSpec,
)
from trainer.bundle.thresholds import ClassThresholds
from trainer.bundle.writing import write_bundle
from trainer.config import BackboneConfig
from trainer.promises import KINDS

RESNET_50: dict[str, Any] = {"model_type": "resnet"}  # transformers' default
_RECALLS = (
    RecallSpec(recall=0.9, confidence=0.9, pooled=0.0, pooled_samples=1000, min_positives=22),
)
_AT_ONCE = 1 << 14


def write_random(
    path: Path, network: dict[str, Any], num_classes: int, *, size: int = 224, onnx: bool = False
) -> None:
    """Write a bundle of `network` with random weights, including all class weights."""
    image = ImageConfig(size=size)
    backbone = build_backbone(BackboneConfig(config=network), image=image).eval()
    write_bundle(
        path,
        backbone=backbone,
        spec=_spec(backbone, image, num_classes),
        classes=_classes(num_classes),
        thresholds=_thresholds(num_classes),
        weight_blocks=_blocks(num_classes, backbone.dim + 1),
        model_card="# random\n",
        write_onnx=(lambda file: write_onnx(backbone, image, file)) if onnx else None,
    )


def stretch(path: Path, num_classes: int, class_ids: np.ndarray) -> None:
    """Extend a bundle to `num_classes` classes, with random weights only for `class_ids`."""
    content = json.loads((path / SPEC).read_bytes())
    write_classes(path, _classes(num_classes))
    _thresholds(num_classes).write(path, num_classes)
    width = content["model"]["dim"] + 1
    header = header_of(TENSOR, num_classes, width)
    with (path / WEIGHTS).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * width * num_classes)
        rows = torch.randn(len(class_ids), width)
        for class_id, row in zip(class_ids.tolist(), rows, strict=True):
            file.seek(len(header) + 4 * width * class_id)
            file.write(row.numpy().tobytes())
    content["model"]["num_classes"] = num_classes
    for name, entry in content["files"].items():
        entry["bytes"] = (path / name).stat().st_size
        if name != WEIGHTS:  # up to 137 GB, and not verified here
            entry["sha256"] = sha256_of(path / name)
    (path / SPEC).write_text(json.dumps(content))


def name_of(class_id: int) -> str:
    return f"species {class_id}"


def _spec(backbone: Backbone, image: ImageConfig, num_classes: int) -> BundleSpec:
    return BundleSpec(
        image=image,
        num_classes=num_classes,
        loss=LossSpec(kind="bce", aligned=True),
        bias=True,
        dim=backbone.dim,
        recalls=_RECALLS,
    )


def _classes(num_classes: int) -> Iterator[ClassEntry]:
    return (ClassEntry(name=name_of(class_id)) for class_id in range(num_classes))


def _thresholds(num_classes: int) -> ClassThresholds:
    positives = np.full(num_classes, 50, np.int32)
    thresholds = np.zeros((num_classes, 1), np.float32)
    reached = np.full((num_classes, 1, 2), 50, np.int32)
    kinds = np.full((num_classes, 1), KINDS.index("guaranteed"), np.uint8)
    pass_rates = np.full((num_classes, 1, 3), 0.95, np.float32)
    return ClassThresholds(_RECALLS, positives, thresholds, reached, kinds, pass_rates)


def _blocks(num_classes: int, width: int) -> Iterator[Tensor]:
    for start in range(0, num_classes, _AT_ONCE):
        yield torch.randn(min(_AT_ONCE, num_classes - start), width)

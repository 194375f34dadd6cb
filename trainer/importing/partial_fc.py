"""Imports the class weights of a Partial FC run (An et al. 2022, InsightFace) as a bundle.

Such a run saves the rows of each rank in a file of its own, apart from the backbone. A YAML file
describes both (`PartialFcConfig`). Logits are `scale` times the cosine of features and rows.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, SerializeAsAny, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, normalize

from data.base_config import FrozenConfig, or_instance
from data.images.config import ImageConfig
from data.messages import one_line
from heads.logits import Cosine
from heads.losses import CrossEntropy
from trainer.backbone.backbone import Backbone, build_backbone, load_weights
from trainer.backbone.onnx_backbone import write_onnx
from trainer.bundle.bundle import Bundle
from trainer.bundle.model_card import NO_THRESHOLDS
from trainer.bundle.spec import BundleSpec, LossSpec
from trainer.bundle.writing import backbone_spec, write_bundle
from trainer.config import BackboneConfig, ImportedBackbone
from trainer.importing.class_names import class_entries, names_in_file
from trainer.importing.classifier import TOLERANCE, Imported, ImportOptions
from trainer.importing.source import is_pickle
from trainer.imports import is_import_path
from trainer.recipe import make_component, read_recipe

_ROWS_AT_ONCE = 65_536
_NUM_IMAGES = 2
_CONVERSION = (
    'a pickle, which kway does not read: convert it with `python -c "import sys, torch; from '
    "safetensors.torch import save_file; [save_file({'weight': torch.load(f, weights_only=True)"
    "['weight']}, f[:-3] + '.safetensors') for f in sys.argv[1:]]\" FILES`"
)


class PartialFcConfig(FrozenConfig):
    """The files of a Partial FC run. Paths are relative to the YAML file."""

    rows: str = Field(
        description="safetensors or npy files with the rows [n, dim] of each rank; the numbers in "
        "the names that match a pattern such as softmax_fc_gpu_*.safetensors are their order"
    )
    tensor: str = Field("weight", description="name of the rows in a safetensors file")
    backbone: Annotated[SerializeAsAny[BackboneConfig], or_instance(ImportedBackbone)]
    backbone_weights: Path | None = Field(
        None, description="safetensors file with the state dict of the backbone's module"
    )
    image: ImageConfig
    scale: float = Field(64.0, gt=0, description="multiplies the cosines")


@dataclass(frozen=True)
class _Rows:
    """The rows of all classes [K, dim], in one or several files."""

    files: list[Path]
    tensor: str

    def blocks(self) -> Iterator[Tensor]:
        for file in self.files:
            yield from self._npy(file) if file.suffix == ".npy" else self._safetensors(file)

    def _npy(self, file: Path) -> Iterator[Tensor]:
        try:
            rows = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file} is not a NumPy array: {one_line(error)}") from error
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            yield torch.from_numpy(np.array(rows[start : start + _ROWS_AT_ONCE], np.float32))

    def _safetensors(self, file: Path) -> Iterator[Tensor]:
        try:
            with safe_open(file, "pt") as opened:
                rows = opened.get_slice(self.tensor)
                for start in range(0, rows.get_shape()[0], _ROWS_AT_ONCE):
                    yield rows[start : start + _ROWS_AT_ONCE].float()
        except SafetensorError as error:
            raise ValueError(f"{file}: {one_line(error)}: set tensor to its name") from error


def import_partial_fc(file: Path, out: Path, options: ImportOptions) -> Imported:
    """Import the run that the YAML `file` describes as the bundle `out`.

    Imports the module in `backbone.kind`, if any. Raises ValueError if a file does not fit.
    """
    config = _config(file)
    rows = _Rows(_files(config.rows, file.parent, options.max_gib), config.tensor)
    backbone = _backbone(config, file.parent)
    num_classes = 0
    for block in rows.blocks():
        if block.ndim != 2 or block.shape[1] != backbone.dim:
            raise ValueError(
                f"{config.rows} has rows of shape {list(block.shape)}, but the backbone has "
                f"{backbone.dim} features"
            )
        num_classes += len(block)
    names = [""] * num_classes
    if options.class_names is not None:
        names = names_in_file(options.class_names, num_classes)
    entries = class_entries(names)
    difference = 0.0

    def check(bundle: Path) -> None:
        nonlocal difference
        difference = _difference(bundle, config, rows)
        if not difference <= TOLERANCE:
            raise ValueError(f"{file}: the logits differ by {difference:.1e} of the largest logit")

    loss = CrossEntropy()
    write_bundle(
        out,
        backbone=backbone,
        spec=BundleSpec(
            pooling=backbone.pooling,
            backbone=backbone_spec(config.backbone),
            image=config.image,
            num_classes=num_classes,
            loss=LossSpec(kind=loss.kind, aligned=loss.aligned),
            logits=Cosine(scale=config.scale),
            bias=False,
            dim=backbone.dim,
        ),
        classes=entries,
        thresholds=None,
        weight_blocks=rows.blocks(),
        model_card=_model_card(file, config, num_classes),
        write_onnx=(
            (lambda file: write_onnx(backbone, config.image, file)) if options.onnx else None
        ),
        check=check,
        force=options.force,
    )
    renamed = sum(entry.name != name for entry, name in zip(entries, names, strict=True))
    return Imported(config.backbone.label, num_classes, renamed, difference)


def _config(file: Path) -> PartialFcConfig:
    tree = read_recipe(file)
    backbone = tree.get("backbone")
    if isinstance(backbone, dict) and is_import_path(backbone.get("kind")):
        tree["backbone"] = make_component(backbone, key="backbone", origin=str(file))
    try:
        return PartialFcConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{file}: {where}: {first['msg']}") from error


def _files(pattern: str, folder: Path, max_gib: float) -> list[Path]:
    files = sorted(folder.glob(pattern), key=_number_in)
    if not files:
        raise FileNotFoundError(f"rows is {pattern}, but {folder} has no such file")
    for file in files:
        if is_pickle(file):
            raise ValueError(f"{file} is {_CONVERSION}")
        if file.suffix not in (".npy", ".safetensors"):
            raise ValueError(f"{file}: pass safetensors or npy files")
    total = sum(file.stat().st_size for file in files)
    if total > max_gib * 2**30:
        raise ValueError(
            f"the rows have {total / 2**30:.1f} GiB, over the limit of {max_gib:g}: raise --max-gib"
        )
    return files


def _number_in(file: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", file.name)], file.name


def _backbone(config: PartialFcConfig, folder: Path) -> Backbone:
    backbone = build_backbone(config.backbone, image=config.image)
    if config.backbone.init is not None:
        load_weights(backbone, config.backbone.init, source="the backbone")
    if config.backbone_weights is not None:
        file = folder / config.backbone_weights
        if is_pickle(file):
            raise ValueError(
                f"{file} is a pickle, which kway does not read: save the state dict with "
                "safetensors.torch.save_file"
            )
        try:
            backbone.encoder.load_state_dict(load_file(file))
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(f"{file} does not match the backbone: {one_line(error)}") from error
    return backbone.eval().requires_grad_(False)


@torch.inference_mode()
def _difference(path: Path, config: PartialFcConfig, rows: _Rows) -> float:
    """Return the largest difference between the bundle's logits and those of Partial FC for random
    images, relative to the largest logit.
    """
    image = config.image
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_IMAGES, image.channels, image.size, image.size)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    allowed = {config.backbone.kind} if isinstance(config.backbone, ImportedBackbone) else ()
    start, differences, largest = 0, [0.0], 1e-30
    with Bundle.open(path) as bundle:
        features = bundle.load_backbone(allow_imports=allowed)({"pixel_values": pixels})
        for block in rows.blocks():
            expected = config.scale * linear(normalize(features), normalize(block))
            found = bundle.logits(features, range(start, start + len(block)))
            differences.append(float((found - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            start += len(block)
    return max(differences) / largest


def _model_card(file: Path, config: PartialFcConfig, num_classes: int) -> str:
    image: Any = config.image
    return f"""# {file.parent.resolve().name}

A classifier for {num_classes} classes, imported by kway from the Partial FC files of `{file.name}`.
Nothing was trained.

| | |
|---|---|
| backbone | {config.backbone.label} |
| head | cosine logits, scale {config.scale:g} |
| loss | NOT aligned with the Principle of Logit Separation |
| input | images, {image.size} x {image.size} x {image.channels} |

{NO_THRESHOLDS}
## Use

    kway query BUNDLE --class NAME IMAGE
    kway serve BUNDLE
"""

"""The exported model: a folder that contains everything required for serving. It does not contain
pickles.

bundle.json                 the specification: preprocessing, loss, recalls, checksums (`spec.py`)
classes.safetensors         the classes, in columns that are read on demand
thresholds.safetensors      thresholds and positives of each class, if the model was evaluated
encoder/config.json         the encoder's transformers configuration; not for imported backbones
backbone.safetensors        the weights of the backbone
backbone.onnx               the backbone for onnxruntime, if requested at export or in int8
class_weights.safetensors   float32 [classes, dim (+ 1: the bias)], read one class at a time
tokenizer/                  files for AutoTokenizer, if the model reads texts
MODEL_CARD.md
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.files import sha256_of
from data.text.tokenizer import Tokenizer, open_tokenizer
from heads.logit_maps import ClassRows
from heads.losses import score
from trainer.backbone.backbone import Backbone, build_backbone, load_weights
from trainer.backbone.config import BackboneConfig, BackboneOptions, ImportedBackbone, Precision
from trainer.backbone.onnx_backbone import OnnxBackbone
from trainer.backbone.precision import check_device, fold_batch_norms
from trainer.bundle.class_list import open_classes
from trainer.bundle.row_file import RowFile
from trainer.bundle.spec import (
    ENCODER,
    ONNX,
    TENSOR,
    TOKENIZER,
    WEIGHTS,
    BundleManifest,
    read_manifest,
)
from trainer.bundle.threshold_file import ClassThresholds, Threshold
from trainer.imports import check_allowed, source_version
from trainer.recipe import make_component

_log = logging.getLogger("kway.bundle")


class Bundle:
    """An open bundle. Data whose size grows with the number of classes stays on disk and is read on
    demand.

    `classes[id]` returns a class with its attributes, and `classes` also finds classes by name.
    `thresholds` is None if the bundle contains none. `version` identifies the contents of all
    files.
    """

    def __init__(self, path: Path, manifest: BundleManifest) -> None:
        self.path = path
        self.spec, self.version = manifest.model, manifest.version
        self._files = manifest.files
        num_classes = self.spec.num_classes
        self.classes = open_classes(path, num_classes, manifest.files)
        self.thresholds = (
            ClassThresholds.open(path, self.spec.recalls, num_classes)
            if self.spec.recalls
            else None
        )
        self._rows = RowFile(
            path / WEIGHTS, name=TENSOR, num_rows=num_classes, width=self.spec.width
        )

    @classmethod
    def open(cls, path: Path) -> "Bundle":
        """Open the bundle folder `path` after checking its specification and the sizes of its
        files.

        Raises FileNotFoundError if the bundle or one of its files is missing, and ValueError if it
        is damaged or has an unsupported format. Use `verify` to compare checksums, which reads all
        files.
        """
        manifest = read_manifest(path)
        for name, expected in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise FileNotFoundError(
                    f"{path / name} is missing: export or copy the bundle again"
                )
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
        """Read every file and verify its checksum. Raises ValueError, naming the file, at the first
        mismatch.

        Set `class_weights` to false to skip the class-weights file, which is by far the largest
        file if there are many classes. `open` has already checked its size and header.
        """
        for name, expected in self._files.items():
            if name == WEIGHTS and not class_weights:
                continue
            if sha256_of(self.path / name) != expected.sha256:
                raise ValueError(
                    f"{self.path / name} does not match its checksum: copy the bundle again"
                )

    def rows(self, class_ids: Sequence[int]) -> ClassRows:
        """Read the rows, float32 [n, dim], and the biases of classes from disk."""
        return self._class_rows(torch.tensor(class_ids), self._rows.read(class_ids))

    def blocks(self, num_classes: int | None = None) -> Iterator[ClassRows]:
        """Yield the rows of all classes, in blocks of `num_classes` consecutive classes."""
        for first, stored in self._rows.blocks(num_classes):
            yield self._class_rows(torch.arange(first, first + len(stored)), stored)

    def _class_rows(self, ids: Tensor, stored: Tensor) -> ClassRows:
        bias = stored[:, self.spec.dim] if self.spec.bias else None
        return ClassRows(ids, stored[:, : self.spec.dim], bias)

    def scores(self, features: Tensor, class_ids: Sequence[int]) -> Tensor:
        """Return the scores [B, n] of classes for features [B, dim], for comparison with
        thresholds.
        """
        return self.scores_of(features, self.rows(class_ids).to(features.device))

    def scores_of(self, features: Tensor, rows: ClassRows) -> Tensor:
        """Return the scores [B, n] of the classes with these rows for features [B, dim]."""
        loss = self.spec.loss
        return score(loss.score, self.spec.logits(features, rows), eps=loss.eps)

    def logits(self, features: Tensor, class_ids: Sequence[int]) -> Tensor:
        """Return the logits [B, n] of classes for features [B, dim]."""
        return self.spec.logits(features, self.rows(class_ids).to(features.device))

    def threshold(self, class_id: int, recall: float) -> Threshold:
        """Return the threshold of a class at `recall`, and what it promises.

        Raises ValueError if the bundle contains no thresholds for this recall.
        """
        if self.thresholds is None:
            raise ValueError(
                "this bundle contains no thresholds: pass a threshold, or add thresholds with "
                "`kway calibrate`"
            )
        return self.thresholds.of(class_id, recall)

    def positives(self, class_id: int) -> int | None:
        """Return the number of validation samples of a class, or None if the model was not
        evaluated.
        """
        return None if self.thresholds is None else int(self.thresholds.positives[class_id])

    @property
    def has_onnx(self) -> bool:
        """Whether the bundle also contains the backbone for onnxruntime."""
        return ONNX in self._files

    def load_as_calibrated(
        self,
        example: dict[str, Tensor],
        *,
        device: str,
        allow_imports: Collection[str] = (),
        precision: Precision | None = None,
        onnx: Path | None = None,
    ) -> Callable[[dict[str, Tensor]], Tensor]:
        """Load the backbone in the bundle's precision, in which its thresholds were set, or in
        another `precision`. int8 then requires the int8 backbone `onnx`.

        `example` are inputs that the backbone can process. Raises ValueError if the device,
        the processor or the installed packages do not support the precision.
        """
        precision = precision or self.spec.precision
        check_device(precision, device)
        if precision == "float32":
            return self.load_backbone(allow_imports=allow_imports).to(device)
        if precision == "int8":
            return OnnxBackbone(onnx or self.path / ONNX)
        backbone = self.load_backbone(allow_imports=allow_imports)
        fold_batch_norms(backbone, example)
        return backbone.to(torch.bfloat16)

    def check_imports(self, allow_imports: Collection[str]) -> None:
        """Raise ValueError if `load_backbone` needs an import that is not in `allow_imports`."""
        if self.spec.backbone is not None:
            paths = {"backbone": self.spec.backbone.kind}
            check_allowed(paths, allow_imports, f"bundle {self.path}")

    def load_backbone(self, *, allow_imports: Collection[str] = ()) -> Backbone:
        """Load the backbone with its trained weights, in evaluation mode, on the CPU.

        A bundle does not contain code. A user-defined backbone is imported, so its import path must
        be in `allow_imports`.
        """
        self.check_imports(allow_imports)
        config = self._backbone_config()
        with torch.random.fork_rng(devices=[]):  # the random initial weights are overwritten below
            backbone = build_backbone(config, image=self.spec.image)
        imported = self.spec.backbone
        source = "encoder/config.json" if imported is None else imported.kind
        load_weights(backbone, self.path, source=source)
        return backbone.eval().requires_grad_(False)

    def _backbone_config(self) -> BackboneOptions:
        imported = self.spec.backbone
        if imported is None:
            return BackboneConfig(name=str(self.path / ENCODER), pooling=self.spec.pooling)
        options = {"kind": imported.kind, "pooling": self.spec.pooling, **imported.options}
        config = make_component(options, key="backbone", origin=f"bundle {self.path}")
        assert isinstance(config, ImportedBackbone)
        found = source_version(imported.kind)
        if found != imported.source:
            _log.warning(
                "%s was exported with %s version %s, but the installed version is %s",
                self.path,
                imported.kind,
                imported.source,
                found,
            )
        return config

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of a text model. It truncates texts to the length used in training."""
        assert self.spec.text is not None, "only text models have a tokenizer"
        folder = self.path / TOKENIZER
        return open_tokenizer(str(folder), max_length=self.spec.text.max_length)

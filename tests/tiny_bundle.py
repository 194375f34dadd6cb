"""Bundles for tests, with a tiny random network for gray 16 x 16 images or for texts."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from data.classes.class_list import ClassInfo
from data.images.config import ImageConfig
from data.text.tokenizer import Tokenizer
from data.text.tokenizer_training import ROLES, train_wordpiece
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.config import BackboneConfig
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import BundleSpec, LossSpec, RecallSpec, TextSpec
from trainer.bundle.threshold_file import ClassThresholds
from trainer.bundle.writing import write_bundle
from trainer.promises import KINDS

IMAGE = ImageConfig(size=16, channels=1, mean=(0.5,), std=(0.25,))
NAMES = ("husky", "malamute", "samoyed", "tabby cat", "siamese cat", "#3", "7")
# Unambiguous names for queries. "#3" could also be the number of another class.
WAYS_TO_ASK = tuple("#5" if name == "#3" else name for name in NAMES)
DIM = 16
MAX_LENGTH = 12


def tiny_backbone() -> Backbone:
    torch.manual_seed(1)
    config = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, DIM],
        "depths": [1, 1],
        "layer_type": "basic",
        "num_channels": 1,
    }
    return build_backbone(BackboneConfig(config=config), image=IMAGE).eval()


def tiny_tokenizer() -> Tokenizer:
    backend = train_wordpiece(["a cat and a dog", "猫 und hund 🐶"])
    return Tokenizer.of(backend, ROLES, max_length=MAX_LENGTH, name="tiny")


def tiny_text_backbone(*, extra_bytes: int = 0) -> Backbone:
    """Return a network with unused embeddings of `extra_bytes`."""
    torch.manual_seed(1)
    config = {
        "model_type": "bert",
        "vocab_size": tiny_tokenizer().vocab_size + extra_bytes // (4 * DIM),
        "hidden_size": DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
    return build_backbone(BackboneConfig(config=config), image=None).eval()


def spec(*, bias: bool = True) -> BundleSpec:
    return BundleSpec(
        image=IMAGE,
        num_classes=len(NAMES),
        loss=LossSpec(kind="batch_ce", aligned=True),
        bias=bias,
        dim=DIM,
        recalls=(
            RecallSpec(
                recall=0.9,
                confidence=0.9,
                pooled=0.5,
                pooled_samples=30,
                below_pooled=0.25,
                min_positives=5,
            ),
            RecallSpec(recall=0.99, confidence=0.9, pooled=None, min_positives=5),
        ),
    )


def classes() -> list[ClassInfo]:
    return [ClassInfo(name=name, attributes={"kind": "pet"}) for name in NAMES]


def thresholds() -> ClassThresholds:
    """Return thresholds: j for class j at every recall.

    All 5 samples of a class and 3 samples of other classes reach its threshold, which is guaranteed
    for all classes but class 5, for which it is shrunk. The last class has no positives. 4 samples
    of other classes reach the pooled threshold, which it has only at recall 0.9.
    """
    num, last = len(NAMES), len(NAMES) - 1
    of_class = np.array([[j, j] for j in range(last)] + [[0.5, np.nan]], np.float32)
    positives = np.array([5] * last + [0], np.int32)
    reached = np.array([[[5, 8]] * 2] * last + [[[0, 4]] * 2], np.int32)
    kinds = np.full((num, 2), KINDS.index("guaranteed"), np.uint8)
    kinds[5], kinds[6] = KINDS.index("shrunk"), KINDS.index("pooled")
    pass_rates = np.tile(np.array([0.95, 0.91, 1.0], np.float32), (num, 2, 1))
    pass_rates[5:] = 0.9, 0.7, 0.98
    return ClassThresholds(spec().recalls, positives, of_class, reached, kinds, pass_rates)


def write_of_format_2(path: Path) -> Path:
    """Write the same bundle in format 2, which has no counts of samples that reach a threshold."""
    write_of_format_4(path)
    _of_older_format(path, 2, ("positives", "thresholds"), "pooled_samples", "pooled_precision")
    return path


def write_of_format_4(path: Path) -> Path:
    """Write the same bundle in format 4, whose thresholds promise nothing."""
    as_format_5(write(path))
    _of_older_format(path, 4, ("positives", "thresholds", "reached"), "confidence", "below_pooled")
    return path


def _of_older_format(path: Path, version: int, names: tuple[str, ...], *removed: str) -> None:
    """Write the thresholds and bundle.json of an older format, without the `removed` keys."""
    arrays = {name: getattr(thresholds(), name) for name in names}
    arrays["thresholds"][-1] = np.nan
    save_file(arrays, path / "thresholds.safetensors")
    file = path / "bundle.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["thresholds.safetensors"] = _entry(path / "thresholds.safetensors")
    for recall in manifest["model"]["recalls"]:
        for key in removed:
            del recall[key]
    if version < 4:
        del manifest["model"]["logits"]
    file.write_text(json.dumps({**manifest, "format_version": version}))


def as_format_5(path: Path) -> None:
    """Replace the class list of a bundle by that of formats 2 to 5."""
    lines = [info.model_dump_json(exclude_defaults=True) for info in Bundle.open(path).classes]
    (path / "classes.jsonl").write_bytes("\n".join([*lines, ""]).encode())
    manifest = json.loads((path / "bundle.json").read_text())
    manifest["files"]["classes.jsonl"] = _entry(path / "classes.jsonl")
    (path / "bundle.json").write_text(json.dumps({**manifest, "format_version": 5}))


def _entry(file: Path) -> dict:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def rows(*, bias: bool = True) -> Tensor:
    return torch.randn(len(NAMES), DIM + bias, generator=torch.Generator().manual_seed(2))


def write(
    path: Path,
    *,
    bias: bool = True,
    blocks: list[Tensor] | None = None,
    changes: dict | None = None,
    entries: list[ClassInfo] | None = None,
    measured: ClassThresholds | None = thresholds(),  # noqa: B008
    **options,
) -> Path:
    weight = rows(bias=bias)
    changed = BundleSpec.model_validate({**spec(bias=bias).model_dump(), **(changes or {})})
    write_bundle(
        path,
        backbone=tiny_backbone(),
        spec=changed,
        classes=classes() if entries is None else entries,
        thresholds=measured and replace(measured, recalls=changed.recalls),
        weight_blocks=iter(weight.split(3) if blocks is None else blocks),
        model_card="# tiny\n",
        **options,
    )
    return path


def write_of_texts(
    path: Path,
    *,
    weight: Tensor | None = None,
    entries: list[ClassInfo] | None = None,
    measured: ClassThresholds | None = None,
    extra_bytes: int = 0,
    **options,
) -> Path:
    """Write a text model, by default with the same classes, thresholds and class weights."""
    text_model = {"image": None, "text": TextSpec(max_length=MAX_LENGTH)}
    write_bundle(
        path,
        backbone=tiny_text_backbone(extra_bytes=extra_bytes),
        spec=BundleSpec.model_validate({**spec().model_dump(), **text_model}),
        classes=classes() if entries is None else entries,
        thresholds=thresholds() if measured is None else measured,
        weight_blocks=[rows() if weight is None else weight],
        model_card="# tiny\n",
        tokenizer=tiny_tokenizer(),
        **options,
    )
    return path

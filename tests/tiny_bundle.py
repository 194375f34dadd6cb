"""Bundles with a tiny random network of grey 16 x 16 pictures, or of texts, for tests."""

from pathlib import Path

import torch
from torch import Tensor

from data.config import ImageConfig
from data.tokens.tokenizer import Tokenizer
from data.tokens.vocabulary import ROLES, train_wordpiece
from trainer.backbone import Backbone, build_backbone
from trainer.bundle import write_bundle
from trainer.bundle_spec import (
    BundleSpec,
    ClassEntry,
    LossSpec,
    RecallThresholds,
    TextSpec,
    Thresholds,
)
from trainer.config import BackboneConfig

IMAGE = ImageConfig(size=16, channels=1, mean=(0.5,), std=(0.25,))
NAMES = ("husky", "malamute", "samoyed", "tabby cat", "siamese cat", "#3", "7")
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
    backend = train_wordpiece(lambda: ["a cat and a dog", "猫 und hund 🐶"], threads=1)
    return Tokenizer.of(backend, ROLES, max_length=MAX_LENGTH, name="tiny")


def tiny_text_backbone() -> Backbone:
    torch.manual_seed(1)
    config = {
        "model_type": "bert",
        "vocab_size": tiny_tokenizer().vocab_size,
        "hidden_size": DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
    return build_backbone(BackboneConfig(config=config), image=None).eval()


def spec(*, bias: bool = True) -> BundleSpec:
    values = tuple(float(place) for place in range(len(NAMES) - 1))
    return BundleSpec(
        image=IMAGE,
        classes=tuple(ClassEntry(name=name, attributes={"kind": "pet"}) for name in NAMES),
        loss=LossSpec(kind="batch_ce", aligned=True),
        bias=bias,
        dim=DIM,
        thresholds=Thresholds(
            positives=(5,) * len(values) + (0,),
            recalls=(
                RecallThresholds(recall=0.9, pooled=0.5, per_class=(*values, None)),
                RecallThresholds(recall=0.99, pooled=None, per_class=(*values, None)),
            ),
        ),
    )


def rows(*, bias: bool = True) -> Tensor:
    return torch.randn(len(NAMES), DIM + bias, generator=torch.Generator().manual_seed(2))


def write(path: Path, *, bias: bool = True, blocks: list[Tensor] | None = None, **options) -> Path:
    weight = rows(bias=bias)
    write_bundle(
        path,
        backbone=tiny_backbone(),
        spec=spec(bias=bias),
        weight_blocks=iter(weight.split(3) if blocks is None else blocks),
        model_card="# tiny\n",
        **options,
    )
    return path


def write_of_texts(path: Path, **options) -> Path:
    """The same classes and class weights, over texts."""
    of_texts = {"image": None, "text": TextSpec(max_length=MAX_LENGTH)}
    write_bundle(
        path,
        backbone=tiny_text_backbone(),
        spec=BundleSpec.model_validate({**spec().model_dump(), **of_texts}),
        weight_blocks=[rows()],
        model_card="# tiny\n",
        tokenizer=tiny_tokenizer(),
        **options,
    )
    return path

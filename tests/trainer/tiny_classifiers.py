"""Classifiers of transformers with tiny random networks, saved as a user would save them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ConvNextImageProcessorPil,
    LevitImageProcessorPil,
    PreTrainedModel,
    ViTImageProcessorPil,
)
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.efficientnet.image_processing_pil_efficientnet import (
    EfficientNetImageProcessorPil,
)

from data.text.tokenizer import Tokenizer
from data.text.tokenizer_training import ROLES, train_wordpiece
from serving.model import Model

NAMES = ("husky", "tabby cat", "crane", "crane", "")
MAX_LENGTH = 24

_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": 32, "window_size": 4}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": _VIT, "text_config": {"hidden_size": 16, "num_hidden_layers": 1}},
    "convnext": {**_STAGES, "hidden_sizes": [8, 16]},
    "deit": {**_VIT, "architectures": ["DeiTForImageClassification"]},
    "dinov2": {**_VIT, "mlp_ratio": 1},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "mobilevitv2": {},
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "swin": _SWIN,
    "vit": _VIT,
}
IMAGE_PROCESSORS: dict[str, Any] = {
    "stretched": ViTImageProcessorPil(size={"height": 32, "width": 32}),
    "cropped to 7/8": ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    "cropped": BitImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
    ),
    "cropped by levit": LevitImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ),
    "64 pixels": ViTImageProcessorPil(size={"height": 64, "width": 64}),
    "divided twice": EfficientNetImageProcessorPil(
        size={"height": 32, "width": 32}, rescale_factor=1 / 127.5, rescale_offset=True
    ),
}

_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
_DECODER = {**_BERT, "num_key_value_heads": 2}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "electra": {**_BERT, "embedding_size": 8},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "llama": _DECODER,
    "modernbert": {**_BERT, "classifier_pooling": "mean"},
    "roberta": _BERT,
}
# These are rejected: their logits depend on the padding, or on tokens to the left of the text.
UNSUPPORTED_TEXT_MODELS: dict[str, dict[str, Any]] = {
    "convbert": {**_BERT, "embedding_size": 16},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
}


def tokenizer() -> Tokenizer:
    texts = ["a cat and a dog", "husky or tabby cat", "一只猫 und ein hund 🐶"]
    backend = train_wordpiece(texts)
    return Tokenizer.of(backend, ROLES, max_length=MAX_LENGTH, name="tiny")


def config_of(kind: str, fields: dict[str, Any], **more: Any) -> Any:
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {}, "num_labels": len(NAMES)}
    return AutoConfig.for_model(kind, **{**fields, **labels, **more})


def save_image_classifier(
    folder: Path, kind: str = "vit", processor: Any = None, **more: Any
) -> PreTrainedModel:
    """Save a classifier of images with its processor and return it."""
    processor = processor or IMAGE_PROCESSORS["64 pixels" if kind == "mobilevitv2" else "stretched"]
    torch.manual_seed(1)
    model = AutoModelForImageClassification.from_config(config_of(kind, IMAGE_MODELS[kind], **more))
    return _saved(model, folder, processor)


def save_text_classifier(folder: Path, kind: str = "bert", **more: Any) -> PreTrainedModel:
    """Save a classifier of texts with its tokenizer and return it."""
    torch.manual_seed(1)
    own = tokenizer()
    config = config_of(
        kind,
        (TEXT_MODELS | UNSUPPORTED_TEXT_MODELS)[kind],
        vocab_size=own.vocab_size,
        pad_token_id=own.pad_id,
        **more,
    )
    own.save(folder)
    return _saved(AutoModelForSequenceClassification.from_config(config), folder)


def bundle_logits(bundle: Path, inputs: Sequence[bytes | str]) -> np.ndarray:
    """Return the logits of image files or texts for all classes of a bundle."""
    model = Model.open(bundle)
    model.self_check()
    features = model.features([model.prepare(each) for each in inputs])
    return model.bundle.logits(features, range(model.bundle.spec.num_classes)).numpy()


def _saved(model: PreTrainedModel, folder: Path, processor: Any = None) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(2)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not name.endswith("running_var"):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    if norms:  # otherwise, the features of deep networks would hardly depend on the image
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(torch.randn(8, 3, 64, 64, generator=generator))
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return model.eval()

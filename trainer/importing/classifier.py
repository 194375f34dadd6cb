"""Imports a trained classifier of transformers or timm as a bundle.

The rows and biases of its last linear layer become class weights, and the rest of the model becomes
the backbone (`trainer/backbone/transformers_models.py`). Before the bundle is published, its logits
are compared with those of the original library for the same images or texts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from data.classes.class_list import ClassInfo
from data.messages import one_line
from heads.losses import BinaryCrossEntropy, CrossEntropy, Loss
from trainer.backbone.backbone import Backbone
from trainer.backbone.onnx_backbone import write_onnx
from trainer.backbone.transformers_models import (
    CONFIGURATION_ERRORS,
    check_timm,
    classifier_class,
    is_timm,
    take_last_layer,
    without_head_arguments,
)
from trainer.bundle.bundle import Bundle
from trainer.bundle.model_card import NO_THRESHOLDS, model_card
from trainer.bundle.spec import BundleSpec, LossSpec
from trainer.bundle.writing import write_bundle
from trainer.importing.preprocessing import Examples, image_examples, text_examples
from trainer.importing.source import open_source

# The largest difference of a logit, relative to the largest logit. Rounding in float32 causes
# differences of about 1e-6.
TOLERANCE = 1e-4
_CLASSES_AT_ONCE = 65_536
# Keys of the configurations of cross-encoders, new and old.
_CROSS_ENCODER = ("sentence_transformers", "sbert_ce_default_activation_function")
_REQUIRED = (
    "apply one linear layer last",
    "apply one linear layer last and ignore the padding after a text",
)


@dataclass(frozen=True)
class Imported:
    """An imported model: its architecture, its number of classes and of renamed classes, and the
    largest difference of a logit from the original model, relative to the largest logit.
    """

    architecture: str
    num_classes: int
    num_renamed: int
    difference: float


def import_classifier(
    source: str,
    out: Path,
    *,
    class_names: Path | None = None,
    max_length: int | None = None,
    onnx: bool = False,
    force: bool = False,
) -> Imported:
    """Import the model `source`, a folder or `hub:NAME`, as the bundle `out`.

    `class_names` is a file with one name per class, and `max_length` is the maximum number of
    tokens of a text; both replace those of the model. If `onnx` is true, the backbone is also
    written for onnxruntime.

    The original model and the bundle's backbone are in memory at the same time. Raises ValueError,
    naming the architecture, if the model cannot be represented or if the logits of the bundle
    differ, and the errors of `open_source` and `write_bundle`. `out` is then not created.
    """
    folder = open_source(source)
    config = _config(folder, source)
    loss = _loss(config, source)
    model = _load(folder, config, source)
    architecture, num_classes = type(model).__name__, config.num_labels or 0
    if model.main_input_name == "input_ids":
        examples = text_examples(folder, model, source, max_length)
    elif max_length is None:
        examples = image_examples(folder, model, source)
    else:
        raise ValueError(f"{source} reads images: remove --max-length")
    expected = _logits(model, examples, num_classes, source)
    with _explained(f"{source}: ", ValueError):
        layer = take_last_layer(model)
    # Without the number of classes in its configuration, the last layer costs no memory when the
    # backbone is built again.
    model.config.architectures, model.config.num_labels = [architecture], 1
    backbone = Backbone(model, pooling="classifier", image=examples.image).eval()
    id2label: Mapping[Any, str] = config.id2label or {}
    names = [str(id2label.get(number, "")) for number in range(num_classes)]
    if class_names is not None:
        names = _names_in_file(class_names, num_classes)
    entries = _class_entries(names)
    rows = layer.weight.detach()
    if layer.bias is not None:
        rows = torch.cat([rows, layer.bias.detach().unsqueeze(1)], 1)
    difference = 0.0

    def check(bundle: Path) -> None:
        nonlocal difference
        what = (
            f"{source}: kway does not support {architecture}, because it does not work with its "
            "last linear layer alone removed: "
        )
        with _explained(what, ValueError, RuntimeError), Bundle.open(bundle) as opened:
            difference = _difference(opened, examples, expected)
        if not difference <= TOLERANCE:  # also true for NaN
            raise ValueError(
                f"{source}: the logits of {architecture} would differ by {difference:.1e} of the "
                f"largest logit: kway supports models that {_REQUIRED[examples.image is None]}"
            )

    spec = BundleSpec(
        pooling="classifier",
        image=examples.image,
        text=examples.text,
        num_classes=num_classes,
        loss=LossSpec.of(loss),
        bias=layer.bias is not None,
        dim=layer.in_features,
    )
    write_bundle(
        out,
        backbone=backbone,
        spec=spec,
        classes=entries,
        thresholds=None,
        weight_blocks=rows.split(_CLASSES_AT_ONCE),
        model_card=model_card(
            Path(source.removeprefix("hub:")).name,
            f"imported by kway on {datetime.now(UTC):%Y-%m-%d}. Nothing\nwas trained.",
            {"original model": f"`{source}`, {architecture}"},
            spec,
            entries[0].name,
            [NO_THRESHOLDS],
        ),
        tokenizer=examples.tokenizer,
        write_onnx=((lambda file: write_onnx(backbone, examples.image, file)) if onnx else None),
        check=check,
        force=force,
    )
    renamed = sum(entry.name != name for entry, name in zip(entries, names, strict=True))
    return Imported(architecture, num_classes, renamed, difference)


@contextmanager
def _explained(message: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert errors of a library to a ValueError of one line that starts with `message`."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{message}{one_line(error)}") from error


def _config(folder: Path, source: str) -> PretrainedConfig:
    what = (
        f"{source}: config.json does not describe a model of transformers or timm that is "
        "installed here: "
    )
    with _explained(what, *CONFIGURATION_ERRORS, OSError, ImportError, RecursionError):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if is_timm(config):
        without_head_arguments(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantized: import the model that it was made from")
    with _explained(f"{source}: ", ValueError):
        check_timm(config)
        classifier_class(config)
        if config.is_encoder_decoder:
            architecture = _architecture(config)
            raise ValueError(f"{architecture} is an encoder-decoder, which kway does not support")
    return config


def _loss(config: PretrainedConfig, source: str) -> Loss:
    """Return the loss with which transformers, or sentence-transformers for a cross-encoder, trains
    a model with this configuration."""
    kind = config.problem_type
    is_cross_encoder = any(hasattr(config, name) for name in _CROSS_ENCODER)
    if kind == "multi_label_classification" or (is_cross_encoder and config.num_labels == 1):
        return BinaryCrossEntropy()
    if kind == "regression" or config.num_labels == 1:
        hint = ""
        if kind != "regression":
            hint = (
                ". If its output was trained with a sigmoid, set problem_type to "
                "multi_label_classification in its config.json"
            )
        raise ValueError(
            f"{source}: {_architecture(config)} is a regression model (problem_type={kind}, "
            f"number of outputs: {config.num_labels}), not a classifier{hint}"
        )
    return CrossEntropy()


def _load(folder: Path, config: PretrainedConfig, source: str) -> PreTrainedModel:
    what = f"{source}: the weights of {_architecture(config)} cannot be loaded: "
    with _explained(what, *CONFIGURATION_ERRORS, OSError, RuntimeError, SafetensorError):
        model, loading = classifier_class(config).from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    untrained = sorted(loading["missing_keys"]) or sorted(loading["mismatched_keys"])
    if untrained:
        raise ValueError(
            f"{source} has no trained weights for {untrained[0]} of {type(model).__name__}: pass "
            "the folder of a trained classifier"
        )
    return model.eval().requires_grad_(False)


def _architecture(config: PretrainedConfig) -> str:
    return (config.architectures or [config.model_type])[0]


@torch.inference_mode()
def _logits(model: PreTrainedModel, examples: Examples, num_classes: int, source: str) -> Tensor:
    """Return the logits [B, K] of the original model."""
    what = f"{source}: {type(model).__name__} cannot process inputs of its own processor: "
    with _explained(what, ValueError, RuntimeError, TypeError, IndexError, AttributeError):
        logits = torch.cat([model(**inputs).logits for inputs in examples.original])
    if logits.shape != (len(examples.original), num_classes):
        raise ValueError(
            f"{source}: {type(model).__name__} returns logits of shape {list(logits.shape)} for "
            f"{num_classes} classes, but kway requires one logit per class and input"
        )
    return logits


def _names_in_file(file: Path, num_classes: int) -> list[str]:
    with _explained(f"{file} is not UTF-8 text: save it as UTF-8: ", UnicodeDecodeError):
        names = file.read_text(encoding="utf-8").splitlines()
    if len(names) != num_classes:
        raise ValueError(
            f"{file} has {len(names):,} lines, but the model has {num_classes:,} classes: write "
            "one class name per line, in the order of the logits"
        )
    return names


def _class_entries(names: Sequence[str]) -> list[ClassInfo]:
    """Return classes with unique names that are not empty.

    An empty name becomes `class 5`, for class 5. A name that several classes have gets the number
    of each of these classes, as in `crane (134)` and `crane (517)`; the original name is then in
    the attribute `label`.
    """
    counts = Counter(names)
    taken = {name for name, count in counts.items() if count == 1}
    entries = []
    for number, name in enumerate(names):
        if name and counts[name] == 1:
            entries.append(ClassInfo(name=name))
            continue
        unique = f"{name} ({number})" if name else f"class {number}"
        while unique in taken:
            unique += "'"
        taken.add(unique)
        entries.append(ClassInfo(name=unique, attributes={"label": name} if name else {}))
    return entries


@torch.inference_mode()
def _difference(bundle: Bundle, examples: Examples, expected: Tensor) -> float:
    """Return the largest difference between the bundle's logits and the `expected` ones [B, K],
    relative to the largest logit.
    """
    backbone = bundle.load_backbone()
    features = torch.cat([backbone(inputs) for inputs in examples.inputs])
    difference = (bundle.logits(features, range(expected.shape[1])) - expected).abs().max()
    return float(difference) / max(float(expected.abs().max()), 1e-30)

"""Encoders and trained classifiers of transformers, which builds those of timm with
`timm.create_model`.

A classifier (`…ForImageClassification`, `…ForSequenceClassification`) computes its logits with one
last linear layer. Replaced by the identity, the model returns the input of that layer, the
features, and the rows and biases of the layer are class weights. Everything before the layer, such
as a pooler or a dense layer, stays in the backbone.
"""

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from data.hub import has_cached_weights, must_use_cache, offline_advice
from data.images.config import ImageConfig
from data.messages import one_line
from trainer.backbone.config import BackboneConfig

_KINDS: tuple[tuple[Any, Any], ...] = (
    (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification),
    (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
)


# Errors that transformers raises for fields that are invalid for a model or contradict each other.
CONFIGURATION_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    StrictDataclassError,
)


def classifier_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads the classifiers with this configuration.

    Raises ValueError if `config` does not describe a classifier of images or texts.
    """
    for mapping, auto in _KINDS:
        models = mapping.get(type(config), ())
        names = {model.__name__ for model in (models if isinstance(models, tuple) else (models,))}
        if names and (not config.architectures or names & set(config.architectures)):
            return auto
    architecture = (config.architectures or [config.model_type])[0]
    raise ValueError(
        f"{architecture} is not a classifier of images or texts: use a model whose architecture "
        "ends with ForImageClassification or ForSequenceClassification"
    )


def take_last_layer(model: Any) -> nn.Linear:
    """Remove the last linear layer of a classifier and return it. The model then returns its
    features, whose number is the attribute `dim`.

    Raises ValueError if the model does not end with a linear layer that computes one logit per
    class.
    """
    num_classes = model.config.num_labels
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not end with a linear layer that computes one logit for "
            f"each of its {num_classes} classes, so it has no class weights"
        )
    # Modules are registered in the order in which they are applied, so the last one is the
    # classifier, also if the hidden size equals the number of classes.
    name, layer = found[-1]
    model.set_submodule(name, nn.Identity())
    model.dim = layer.in_features
    return layer


def load_settings(config: BackboneConfig, image: ImageConfig | None) -> PretrainedConfig:
    """Return the transformers configuration of an encoder. Raises ValueError, naming the setting,
    if there is none, or if kway does not support the model.
    """
    settings = _settings(config)
    check_timm(settings)
    if settings.is_encoder_decoder:
        raise ValueError(
            f"backbone.config.model_type is {settings.model_type}, which is an encoder-decoder: "
            "choose an encoder-only model"
        )
    channels = getattr(settings, "num_channels", None)
    is_text = hasattr(settings, "vocab_size")
    if not is_text and image is not None and channels not in (None, image.channels):
        raise ValueError(
            f"backbone.config.num_channels is {channels}, but data.image.channels is "
            f"{image.channels}: set them to the same number"
        )
    return settings


def load_encoder(config: BackboneConfig, settings: PretrainedConfig) -> PreTrainedModel:
    """Return an encoder without its pooler or, if `pooling` is classifier, a classifier without its
    last layer. Weights are loaded from a local folder or the hub, only as safetensors. Code from
    the hub is never executed. Raises one of `CONFIGURATION_ERRORS` if the settings are not valid.
    """
    auto: Any = AutoModel
    options: dict[str, Any] = {"trust_remote_code": False}
    if config.pooling == "classifier":
        auto = classifier_class(settings)
    else:
        model: Any = MODEL_MAPPING[type(settings)]
        if "add_pooling_layer" in inspect.signature(model).parameters:
            # The pooler's output is not used, so its weights would never get a gradient, but DDP
            # would wait for one.
            options["add_pooling_layer"] = False
    if config.weights == "pretrained":
        encoder: PreTrainedModel = auto.from_pretrained(
            str(config.name),
            use_safetensors=True,
            local_files_only=must_use_cache(str(config.name)),
            **options,
        )
    else:
        encoder = auto.from_config(settings, **options)
    if config.pooling == "classifier":
        take_last_layer(encoder)
    return encoder


def _settings(config: BackboneConfig) -> PretrainedConfig:
    if config.name is not None:
        return _named(config.name, has_weights=config.weights == "pretrained")
    fields = dict(config.config or {})
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        hint = f"did you mean {near[0]}?" if near else "examples are resnet and bert"
        raise ValueError(
            f"backbone.config.model_type is {model_type}, which transformers does not support: "
            f"{hint}"
        )
    try:
        default = AutoConfig.for_model(model_type)
        known = {*default.to_dict(), *default.attribute_map}
        for name in fields.keys() - known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see the fields of {model_type}"
            raise ValueError(f"{name} is not a known key: {hint}")
        return AutoConfig.for_model(model_type, **fields)
    except CONFIGURATION_ERRORS as error:
        raise ValueError(f"backbone.config: {one_line(error)}") from error


def _named(name: str, *, has_weights: bool) -> PretrainedConfig:
    is_offline = must_use_cache(name)
    offline = (
        f"backbone.name is {name}: there is no such folder, and "
        f"{offline_advice(name, 'backbone.name=')}"
    )
    try:
        settings = AutoConfig.from_pretrained(
            name, trust_remote_code=False, local_files_only=is_offline
        )
    except (OSError, ValueError) as error:
        if is_offline:
            raise ValueError(offline) from error
        where = (
            "the folder does not contain a transformers model"
            if Path(name).is_dir()
            else "there is no such folder, and the model was not found on the hub"
        )
        raise ValueError(f"backbone.name is {name}: {where}: {one_line(error)}") from error
    # transformers would request missing weights from the hub in spite of `local_files_only`.
    if is_offline and has_weights and not has_cached_weights(name):
        raise ValueError(offline)
    return settings


_MODEL_TYPE = "timm_wrapper"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
# Arguments with which `timm.create_model` reads files (also pickles) or downloads.
_UNSAFE = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def is_timm(config: PretrainedConfig) -> bool:
    """Return whether a configuration describes a timm model."""
    return bool(config.model_type == _MODEL_TYPE)


def check_timm(config: PretrainedConfig) -> None:
    """Raise ValueError if creating a timm model would read files or contact the hub."""
    if not is_timm(config):
        return
    name, arguments = config.architecture, config.model_args or {}
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"architecture is {name!r}: use the name of a timm model, such as resnet50.a1_in1k"
        )
    for key in arguments.keys() & set(_UNSAFE):
        raise ValueError(f"model_args of timm model {name} contains {key}: remove it")


def without_head_arguments(config: PretrainedConfig) -> None:
    """Remove the number of classes from the arguments of a timm model, in place.

    timm saves all arguments with which a model was created, and transformers passes the number of
    classes a second time. The weights are in the same folder, so `pretrained` is not needed.
    """
    arguments: dict[str, Any] = config.model_args or {}
    dropped = ("num_classes", "pretrained")
    config.model_args = {key: each for key, each in arguments.items() if key not in dropped}

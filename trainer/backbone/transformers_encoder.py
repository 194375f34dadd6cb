"""Encoders of transformers, from a configuration, a local folder or the hub."""

import difflib
import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
)

from data.hub import has_cached_weights, must_use_cache, offline_advice
from data.images.config import ImageConfig
from data.messages import one_line
from trainer.backbone.classifiers import classifier_class, take_last_layer
from trainer.backbone.config import BackboneConfig
from trainer.backbone.timm_models import check_timm

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


def build_encoder(config: BackboneConfig, settings: PretrainedConfig) -> PreTrainedModel:
    """Return a transformers encoder without its pooler or, if `pooling` is classifier, a classifier
    without its last layer. Weights are loaded from a local folder or the hub, only as safetensors.
    Code from the hub is never executed.

    `settings` is the result of `encoder_settings`. Raises one of CONFIGURATION_ERRORS if it is not
    valid.
    """
    if config.pooling == "classifier":
        encoder = _model(classifier_class(settings), config, settings)
        take_last_layer(encoder)
        return encoder
    return _encoder(config, settings)


def encoder_settings(config: BackboneConfig, image: ImageConfig | None) -> PretrainedConfig:
    """Return the transformers configuration of an encoder. Raises ValueError, naming the setting,
    if it cannot be an encoder for `image`."""
    settings = _settings(config)
    check_timm(settings)
    if settings.is_encoder_decoder:
        raise ValueError(
            f"backbone.config.model_type is {settings.model_type}, which is an encoder-decoder: "
            "choose an encoder-only model"
        )
    channels = getattr(settings, "num_channels", None)
    is_image = not hasattr(settings, "vocab_size")
    if is_image and image is not None and channels not in (None, image.channels):
        raise ValueError(
            f"backbone.config.num_channels is {channels}, but data.image.channels is "
            f"{image.channels}: set them to the same number"
        )
    return settings


def _encoder(config: BackboneConfig, settings: PretrainedConfig) -> PreTrainedModel:
    # The pooler's output is not used, so its weights would never get a gradient, but DDP would
    # wait for one.
    model: Any = MODEL_MAPPING[type(settings)]
    parameters = inspect.signature(model).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
    return _model(AutoModel, config, settings, **options)


def _model(
    auto: Any, config: BackboneConfig, settings: PretrainedConfig, **options: Any
) -> PreTrainedModel:
    if config.weights != "pretrained":
        return auto.from_config(settings, trust_remote_code=False, **options)
    return auto.from_pretrained(
        str(config.name),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=must_use_cache(str(config.name)),
        **options,
    )


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

"""The model below the head: an encoder that computes features from the inputs of a batch."""

import difflib
import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn
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
from trainer.backbone.batch_norm import BATCH_NORMS
from trainer.backbone.classifiers import (
    Features,
    classifier_class,
    reads_texts,
    take_last_layer,
)
from trainer.backbone.config import BackboneConfig, BackboneOptions, ImportedBackbone
from trainer.backbone.timm_models import check_timm
from trainer.bundle.spec import BACKBONE, ENCODER, read_manifest
from trainer.imports import import_component

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


class Backbone(nn.Module):
    """Computes features [B, dim] from the inputs of a batch.

    `forward` accepts `{"pixel_values": uint8 [B, C, H, W]}` or `{"input_ids", "attention_mask":
    int64 [B, T]}`. Images are normalized here, on the device, so that loaders can pass uint8
    pixels. With several crops, uint8 [B, crops, C, H, W], the features of the crops are averaged.
    Logits are linear in the features, so this is equivalent to averaging the logits.
    """

    mean: Tensor
    std: Tensor
    # Settings of the training run that are not part of the model.
    precision: torch.dtype | None = None
    channels_last: bool = False

    def __init__(self, encoder: nn.Module, *, pooling: str, image: ImageConfig | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling
        self.modality = "text" if image is None else "image"
        self.dim = _num_features(encoder)
        # Networks with batch norm are convolutional, so they accept an empty batch. Do not add a
        # dummy row, because it would change the statistics.
        self._accepts_empty_batch = any(isinstance(part, BATCH_NORMS) for part in encoder.modules())
        if image is not None:
            constants = torch.tensor([image.mean, image.std], dtype=torch.float32)
            for name, row in zip(("mean", "std"), constants, strict=True):
                self.register_buffer(name, row.view(1, -1, 1, 1), persistent=False)

    @property
    def settings(self) -> Any:
        """The object whose attributes are the encoder's settings, such as `vocab_size`: the
        transformers configuration or, for an imported module, the module itself.
        """
        return self.encoder.config if self._is_transformers else self.encoder

    @property
    def architecture(self) -> str:
        """The name of the encoder's architecture, for messages."""
        return self.settings.model_type if self._is_transformers else type(self.encoder).__name__

    @property
    def _is_transformers(self) -> bool:
        return isinstance(self.encoder, PreTrainedModel)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        if self.precision is None:
            return self._forward(inputs)
        # Enter autocast inside the module: DeepSpeed disables an autocast context around it.
        with torch.autocast(next(iter(inputs.values())).device.type, self.precision):
            return self._forward(inputs)

    def _forward(self, inputs: dict[str, Tensor]) -> Tensor:
        if not self._accepts_empty_batch and not len(next(iter(inputs.values()))):
            # Attention cannot infer shapes from an empty batch. Compute one row and drop it. Every
            # parameter then gets a gradient, as on the other ranks, but the gradient is zero.
            row = {name: tensor.new_ones(1, *tensor.shape[1:]) for name, tensor in inputs.items()}
            return self._features(row)[:0]
        return self._features(inputs)

    def _features(self, inputs: dict[str, Tensor]) -> Tensor:
        if "pixel_values" not in inputs:
            return self._pooled(self.encoder(**inputs), inputs["attention_mask"])
        pixels = inputs["pixel_values"]
        if pixels.ndim == 5:
            crops = self._image_features(pixels.flatten(0, 1))
            return crops.unflatten(0, pixels.shape[:2]).mean(1)
        return self._image_features(pixels)

    def _image_features(self, pixels: Tensor) -> Tensor:
        normalized = (pixels.to(self.mean.dtype) / 255 - self.mean) / self.std
        if self.channels_last:
            normalized = normalized.contiguous(memory_format=torch.channels_last)
        if self._is_transformers:
            return self._pooled(self.encoder(pixel_values=normalized), None)
        return self._pooled(self.encoder(normalized), None)

    def _pooled(self, output: Any, mask: Tensor | None) -> Tensor:
        # Do not return a view: FSDP registers hooks on a module's output, and an in-place change of
        # a view drops them.
        if self.pooling == "classifier":
            logits: Tensor = output.logits  # of a model without its last layer: the features
            return logits.clone()
        if isinstance(output, Tensor):
            if output.shape[1:] != (self.dim,):
                raise ValueError(
                    f"backbone {self.architecture} returns features of shape "
                    f"{tuple(output.shape)}, but its dim requires shape [batch, {self.dim}]"
                )
            return output.clone()
        hidden: Tensor = output.last_hidden_state
        if hidden.ndim == 4:  # a feature map [B, dim, h, w]
            if self.pooling == "cls":
                raise ValueError(
                    "backbone.pooling is cls, but this encoder returns a feature map without "
                    "tokens: use auto or mean"
                )
            pooled = output.get("pooler_output")
            return hidden.mean((2, 3)) if pooled is None else pooled.flatten(1).clone()
        if self.pooling != "mean":
            return hidden[:, 0].clone()
        if mask is None:
            return hidden.mean(1)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def build_backbone(config: BackboneOptions, *, image: ImageConfig | None) -> Backbone:
    """Build the backbone that `config` describes.

    Random weights are drawn from torch's global generator, which the caller must seed. Raises
    ValueError, naming the setting, if the encoder configuration is not valid.
    """
    if isinstance(config, ImportedBackbone):
        encoder = import_component(config.kind, key="backbone")(**config.arguments)
        if not isinstance(encoder, nn.Module):
            raise ValueError(
                f"backbone.kind is {config.kind}, which returns an object of type "
                f"{type(encoder).__name__}: make it return an nn.Module"
            )
        return _wrapped(encoder, config, image)
    assert isinstance(config, BackboneConfig)
    if config.name is None and config.config is None:
        config = _of_bundle(config)
    return _of_transformers(config, image)


def _of_bundle(config: BackboneConfig) -> BackboneConfig:
    """Return the configuration of the encoder in the bundle `config.init`, with the pooling of the
    bundle unless the recipe sets another one.
    """
    assert config.init is not None
    spec = read_manifest(config.init).model
    if spec.backbone is not None:
        raise ValueError(
            f"backbone.init is {config.init}, whose backbone is imported: set "
            f"backbone.kind={spec.backbone.kind}"
        )
    pooling = spec.pooling if config.pooling == "auto" else config.pooling
    return BackboneConfig(
        name=str(config.init / ENCODER), pooling=pooling, batch_norm=config.batch_norm
    )


def load_weights(backbone: Backbone, bundle: Path, *, source: str) -> None:
    """Load the weights of a bundle's backbone. `source` describes the architecture in messages.

    Raises ValueError if they do not match.
    """
    file = bundle / BACKBONE
    try:
        load_model(backbone, str(file), strict=True)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{file} does not match {source}: {one_line(error, 1000)}") from error


def _wrapped(encoder: nn.Module, config: BackboneOptions, image: ImageConfig | None) -> Backbone:
    if config.pooling == "classifier":
        if not isinstance(encoder, PreTrainedModel):
            raise ValueError(
                "backbone.pooling is classifier, which requires a transformers model: use auto"
            )
        is_text = reads_texts(encoder)
    else:
        settings = encoder.config if isinstance(encoder, PreTrainedModel) else encoder
        is_text = hasattr(settings, "vocab_size")
    return Backbone(encoder, pooling=config.pooling, image=None if is_text else image)


def _num_features(encoder: nn.Module) -> int:
    """Return the number of features of an encoder from transformers or timm, or of a user-defined
    module.
    """
    for part in encoder.modules():
        if isinstance(part, Features):
            return part.dim
    if isinstance(encoder, PreTrainedModel):
        config = encoder.config
        dim = config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size
    else:
        dim = getattr(encoder, "dim", getattr(encoder, "num_features", None))
    if not isinstance(dim, int):
        raise ValueError(
            f"backbone {type(encoder).__name__} does not define its number of features: set "
            "self.dim to an integer"
        )
    return dim


def _of_transformers(config: BackboneConfig, image: ImageConfig | None) -> Backbone:
    """Return a transformers encoder without its pooler or, if `pooling` is classifier, a classifier
    without its last layer. Weights are loaded from a local folder or the hub, only as safetensors.
    Code from the hub is never executed."""
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
    try:
        if config.pooling == "classifier":
            encoder = _model(classifier_class(settings), config, settings)
            take_last_layer(encoder)
        else:
            # The pooler's output is not used, so its weights would never get a gradient, but DDP
            # would wait for one.
            model: Any = MODEL_MAPPING[type(settings)]
            has_pooler = "add_pooling_layer" in inspect.signature(model).parameters
            options = {"add_pooling_layer": False} if has_pooler else {}
            encoder = _model(AutoModel, config, settings, **options)
        return _wrapped(encoder, config, image)
    except CONFIGURATION_ERRORS as error:
        raise ValueError(
            f"backbone.config does not define a valid model: {one_line(error)}"
        ) from error


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

"""The model below the head: an encoder that computes features from the inputs of a batch."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from data.images.config import ImageConfig
from data.messages import one_line
from trainer.backbone.batch_norm import BATCH_NORMS
from trainer.backbone.classifiers import Features, reads_texts
from trainer.backbone.config import BackboneConfig, BackboneOptions, ImportedBackbone
from trainer.bundle.spec import BACKBONE, ENCODER, read_manifest
from trainer.imports import import_component


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
        return settings_of(self.encoder)

    @property
    def architecture(self) -> str:
        """The name of the encoder's architecture, for messages."""
        is_known = is_transformers(self.encoder)
        return self.settings.model_type if is_known else type(self.encoder).__name__

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
        if is_transformers(self.encoder):
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


def is_transformers(encoder: nn.Module) -> bool:
    """Return whether an encoder is a model of transformers, without importing transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(encoder, loaded.PreTrainedModel)


def settings_of(encoder: nn.Module) -> Any:
    """Return the object whose attributes are the settings of an encoder; see
    `Backbone.settings`."""
    return encoder.config if is_transformers(encoder) else encoder


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
    # Its import takes seconds, which a run with an imported backbone does not need.
    from trainer.backbone import transformers_encoder

    settings = transformers_encoder.encoder_settings(config, image)
    try:
        return _wrapped(transformers_encoder.build_encoder(config, settings), config, image)
    except transformers_encoder.CONFIGURATION_ERRORS as error:
        raise ValueError(
            f"backbone.config does not define a valid model: {one_line(error)}"
        ) from error


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
        if not is_transformers(encoder):
            raise ValueError(
                "backbone.pooling is classifier, which requires a transformers model: use auto"
            )
        is_text = reads_texts(encoder)  # type: ignore[arg-type]  # a transformers model
    else:
        is_text = hasattr(settings_of(encoder), "vocab_size")
    return Backbone(encoder, pooling=config.pooling, image=None if is_text else image)


def _num_features(encoder: nn.Module) -> int:
    """Return the number of features of an encoder from transformers or timm, or of a user-defined
    module.
    """
    for part in encoder.modules():
        if isinstance(part, Features):
            return part.dim
    if is_transformers(encoder):
        config = settings_of(encoder)
        dim = config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size
    else:
        dim = getattr(encoder, "dim", getattr(encoder, "num_features", None))
    if not isinstance(dim, int):
        raise ValueError(
            f"backbone {type(encoder).__name__} does not define its number of features: set "
            "self.dim to an integer"
        )
    return dim

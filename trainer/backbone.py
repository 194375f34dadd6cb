"""The part below the head: a transformers encoder that turns a batch's inputs into features."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from data.config import ImageConfig
from trainer.config import BackboneConfig


class Backbone(nn.Module):
    """Inputs of a batch -> features [B, dim].

    `forward` takes `{"pixel_values": uint8 [B, C, H, W]}` or `{"input_ids", "attention_mask":
    int64 [B, T]}`. Pictures are normalised here, on the device, so that loaders hand over bytes.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, *, pooling: str, image: ImageConfig | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling
        config = encoder.config
        assert isinstance(config, PretrainedConfig)
        self.dim: int = (
            config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size
        )
        if image is not None:
            constants = torch.tensor([image.mean, image.std], dtype=torch.float32)
            for name, row in zip(("mean", "std"), constants, strict=True):
                self.register_buffer(name, row.view(1, -1, 1, 1), persistent=False)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        if "pixel_values" in inputs:
            pixels = (inputs["pixel_values"].to(self.mean.dtype) / 255 - self.mean) / self.std
            output = self.encoder(pixel_values=pixels)
        else:
            output = self.encoder(**inputs)
        match self.pooling:
            case "auto" if "pixel_values" in inputs and output.get("pooler_output") is not None:
                return output.pooler_output.flatten(1)
            case "mean" if "attention_mask" in inputs:
                mask = inputs["attention_mask"].unsqueeze(-1).to(output.last_hidden_state.dtype)
                return (output.last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)
            case "mean":
                return output.last_hidden_state.flatten(2).mean(2)
            case _:
                return output.last_hidden_state[:, 0]


def build_backbone(config: BackboneConfig, *, image: ImageConfig | None) -> Backbone:
    """Make the encoder that `config` names, without a pooler that nothing would train.

    Weights come from a local folder or the hub as safetensors only; code from the hub is never run.
    Random weights follow torch's global generator: seed it first.
    """
    if config.name is not None:
        settings = AutoConfig.from_pretrained(config.name, trust_remote_code=False)
    else:
        fields = dict(config.config or {})
        try:
            settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"backbone.config: {error}") from error
    is_text = hasattr(settings, "vocab_size")
    _check_channels(settings, image, is_text=is_text)
    # BERT's pooler stands after the token that we read: without a gradient DDP would wait for it.
    options = {"add_pooling_layer": False} if is_text else {}
    if config.weights == "pretrained":
        encoder = AutoModel.from_pretrained(
            str(config.name), trust_remote_code=False, use_safetensors=True, **options
        )
    else:
        encoder = AutoModel.from_config(settings, trust_remote_code=False, **options)
    return Backbone(encoder, pooling=config.pooling, image=None if is_text else image)


def _check_channels(
    settings: PretrainedConfig, image: ImageConfig | None, *, is_text: bool
) -> None:
    channels = getattr(settings, "num_channels", None)
    if not is_text and image is not None and channels not in (None, image.channels):
        raise ValueError(
            f"backbone.config.num_channels is {channels} and data.image.channels is "
            f"{image.channels}: make them equal"
        )


def save_encoder_config(backbone: Backbone, folder: Path) -> None:
    """Write the encoder's transformers `config.json` into `folder`."""
    config = backbone.encoder.config
    assert isinstance(config, PretrainedConfig)
    config.save_pretrained(folder)

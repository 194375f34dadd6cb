"""Fully connected layers on pixels: the MNIST network in section 6.1 of the paper on single-logit
classification (Keren, Sabato and Schuller 2019)."""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithNoAttention

from trainer.backbone.networks.base import (
    FixedSizeConfig,
    FullyConnected,
    ImageNetwork,
    check_positive,
)


@strict
class MlpConfig(FixedSizeConfig):
    """`hidden_sizes` lists the number of units in each layer."""

    model_type = "mlp"

    image_size: int = 28
    num_channels: int = 1
    hidden_sizes: list[int] | tuple[int, ...] = (500, 500)

    def __post_init__(self, **kwargs: object) -> None:
        check_positive(hidden_sizes=self.hidden_sizes)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.hidden_sizes[-1]


class MlpModel(ImageNetwork):
    """Fully connected layers, each followed by batch norm and ReLU. Features are [B, dim, 1, 1]."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        pixels = config.num_channels * config.image_size**2
        inputs = (pixels, *config.hidden_sizes)
        self.layers = nn.ModuleList(
            FullyConnected(before, after)
            for before, after in zip(inputs, config.hidden_sizes, strict=False)
        )
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        """Raises ValueError if the images are not of size `image_size`."""
        self.config.check_image_size(*pixel_values.shape[2:])
        hidden = pixel_values
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=hidden)

"""Six convolutions and a dense layer: the SVHN and CIFAR network in section 6.1 of the paper on
single-logit classification (SLC; Keren, Sabato and Schuller 2019)."""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithNoAttention

from trainer.backbone.networks.base import (
    FixedSizeConfig,
    FullyConnected,
    ImageNetwork,
    check_positive,
    convolution,
)


@strict
class SlcCnnConfig(FixedSizeConfig):
    """`conv_channels` lists the number of feature maps of each of the six convolutions.
    `hidden_size` is the number of units of the dense layer.
    """

    model_type = "slc_cnn"

    conv_channels: list[int] | tuple[int, ...] = (128, 128, 256, 256, 512, 512)
    hidden_size: int = 1024

    def __post_init__(self, **kwargs: object) -> None:
        if len(self.conv_channels) != 6:
            raise ValueError(
                f"conv_channels is {self.conv_channels}: set six numbers, one per convolution"
            )
        check_positive(conv_channels=self.conv_channels, hidden_size=self.hidden_size)
        super().__post_init__(**kwargs)


class SlcCnnModel(ImageNetwork):
    """Convolutions 1, 3 and 5 are 5 x 5, and the others are 1 x 1. Each is followed by batch norm
    and ReLU. Convolutions 2, 4 and 6 are followed by 3 x 3 max pooling with stride 2. Features are
    [B, dim, 1, 1].

    The paper does not specify the padding. Here convolutions keep the image size and max pooling
    halves it, rounded up.
    """

    config: SlcCnnConfig

    def __init__(self, config: SlcCnnConfig) -> None:
        super().__init__(config)
        channels = (config.num_channels, *config.conv_channels)
        side = config.image_size
        self.layers = nn.ModuleList()
        for first in (0, 2, 4):
            self.layers.append(_stage(*channels[first : first + 3]))
            side = (side + 1) // 2
        self.layers.append(FullyConnected(channels[-1] * side**2, config.hidden_size))
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        """Raises ValueError if the images are not of size `image_size`."""
        self.config.check_image_size(*pixel_values.shape[2:])
        hidden = pixel_values
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=hidden)


def _stage(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(inputs, middle, 5),
        nn.BatchNorm2d(middle),
        nn.ReLU(),
        convolution(middle, outputs, 1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )

"""Wide residual networks for CIFAR, WRN-`depth`-`width`: Zagoruyko and Komodakis (2016)."""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithNoAttention

from trainer.backbone.networks.base import (
    ImageNetwork,
    check_dropout,
    check_positive,
    convolution,
    layers_per_stage,
)

_STEM = 16


@strict
class WideResNetConfig(PreTrainedConfig):
    """`depth` is 6 n + 4, and `width` multiplies the number of maps. `dropout` is applied between
    the convolutions of a block. The paper uses either no dropout or a dropout of 0.3 on CIFAR and
    0.4 on SVHN.
    """

    model_type = "wide_resnet"

    depth: int = 28
    width: int = 10
    dropout: float | int = 0.0
    num_channels: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        layers_per_stage(self.depth, step=6, outside=4)
        check_positive(width=self.width, num_channels=self.num_channels)
        check_dropout(self.dropout)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return 4 * _STEM * self.width


class PreActivationBlock(nn.Module):
    """A residual block in which batch norm and ReLU precede each convolution. If the number of maps
    changes, the shortcut is a 1 x 1 convolution of the first ReLU's output.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, outputs, 3, stride=stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = convolution(outputs, outputs, 3)
        self.shortcut = (
            None if inputs == outputs else convolution(inputs, outputs, 1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        hidden = self.dropout(F.relu(self.norm2(self.conv1(active))))
        return self.conv2(hidden) + (x if self.shortcut is None else self.shortcut(active))


class WideResNetModel(ImageNetwork):
    """A 3 x 3 convolution to 16 maps and three stages of n blocks. Accepts images of any size."""

    config: WideResNetConfig

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        self.stem = convolution(config.num_channels, _STEM, 3)
        self.stages = nn.ModuleList()
        inputs = _STEM
        for stage, stride in enumerate((1, 2, 2)):
            outputs = _STEM * config.width * 2**stage
            self.stages.append(_stage(inputs, outputs, stride, config))
            inputs = outputs
        self.norm = nn.BatchNorm2d(inputs)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        hidden = self.stem(pixel_values)
        for stage in self.stages:
            hidden = stage(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=F.relu(self.norm(hidden)))


def _stage(inputs: int, outputs: int, stride: int, config: WideResNetConfig) -> nn.Sequential:
    blocks = layers_per_stage(config.depth, step=6, outside=4)
    return nn.Sequential(
        PreActivationBlock(inputs, outputs, stride=stride, dropout=config.dropout),
        *(
            PreActivationBlock(outputs, outputs, stride=1, dropout=config.dropout)
            for _ in range(blocks - 1)
        ),
    )

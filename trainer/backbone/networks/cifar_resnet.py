"""The residual networks of He et al. (2016), section 4.2, for CIFAR: ResNet-20 to -110."""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithNoAttention

from trainer.backbone.networks.base import (
    ImageNetwork,
    check_positive,
    convolution,
    layers_per_stage,
)


@strict
class CifarResNetConfig(PreTrainedConfig):
    """`depth` counts the layers with weights, including the classifier: 6 n + 2.

    `hidden_sizes` lists the number of feature maps of each of the three stages. Each of the last
    two stages halves the image size.
    """

    model_type = "cifar_resnet"

    depth: int = 20
    hidden_sizes: list[int] | tuple[int, ...] = (16, 32, 64)
    num_channels: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        layers_per_stage(self.depth, step=6, outside=2)
        check_positive(hidden_sizes=self.hidden_sizes, num_channels=self.num_channels)
        if len(self.hidden_sizes) != 3 or list(self.hidden_sizes) != sorted(self.hidden_sizes):
            raise ValueError(
                f"hidden_sizes is {self.hidden_sizes}: set three numbers in ascending order, "
                "because a shortcut can only add maps"
            )
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.hidden_sizes[-1]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without weights ("option A")."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, 3, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Return the input subsampled by the stride and padded with maps of zeros."""
        subsampled = x[:, :, :: self.stride, :: self.stride]
        return F.pad(subsampled, (0, 0, 0, 0, 0, self.added))


class CifarResNetModel(ImageNetwork):
    """A 3 x 3 convolution and three stages of n blocks. Accepts images of any size."""

    config: CifarResNetConfig

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        blocks = layers_per_stage(config.depth, step=6, outside=2)
        first, second, third = config.hidden_sizes
        self.stem = convolution(config.num_channels, first, 3)
        self.norm = nn.BatchNorm2d(first)
        self.stages = nn.ModuleList(
            (
                _stage(first, first, blocks, stride=1),
                _stage(first, second, blocks, stride=2),
                _stage(second, third, blocks, stride=2),
            )
        )
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        hidden = F.relu(self.norm(self.stem(pixel_values)))
        for stage in self.stages:
            hidden = stage(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=hidden)


def _stage(inputs: int, outputs: int, blocks: int, *, stride: int) -> nn.Sequential:
    others = (BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(inputs, outputs, stride=stride), *others)

"""Densely connected networks for CIFAR, DenseNet-`depth`-`growth_rate`: Huang et al. (2017)."""

import torch
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

_BLOCKS = 3
_LEAST_SIDE = 4  # two transitions halve the side


@strict
class CifarDenseNetConfig(PreTrainedConfig):
    """`growth_rate` is the number of feature maps that a layer adds.

    `bottleneck` adds a 1 x 1 convolution with 4 `growth_rate` output maps to each layer.
    `compression` is the fraction of maps that remain after a transition. DenseNet-BC uses
    bottlenecks and a compression of 0.5. `depth` counts the layers with weights, including the
    classifier: 3 n + 4, or 6 n + 4 with `bottleneck`. `dropout` follows each convolution except the
    first; the paper uses 0.2 without augmentation.
    """

    model_type = "cifar_densenet"

    depth: int = 40
    growth_rate: int = 12
    bottleneck: bool = False
    compression: float | int = 1.0
    dropout: float | int = 0.0
    num_channels: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        check_positive(growth_rate=self.growth_rate, num_channels=self.num_channels)
        check_dropout(self.dropout)
        if not 1 <= self.compression * self.maps[0] <= self.maps[0]:
            raise ValueError(
                f"compression is {self.compression}: set it to a fraction of at most 1 that leaves "
                "at least one map after each transition"
            )
        super().__post_init__(**kwargs)

    @property
    def layers_per_block(self) -> int:
        return layers_per_stage(self.depth, step=6 if self.bottleneck else 3, outside=4)

    @property
    def maps(self) -> tuple[int, ...]:
        """The number of maps before each dense block and after the last one."""
        before = [2 * self.growth_rate if self.bottleneck else 16]
        grown = self.layers_per_block * self.growth_rate
        for _ in range(_BLOCKS - 1):
            before.append(int((before[-1] + grown) * self.compression))
        return (*before, before[-1] + grown)

    @property
    def hidden_size(self) -> int:
        return self.maps[-1]


class DenseLayer(nn.Module):
    """Appends `growth_rate` maps to its input: [B, C, h, w] -> [B, C + growth, h, w]."""

    def __init__(self, inputs: int, config: CifarDenseNetConfig) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        if config.bottleneck:
            middle = 4 * config.growth_rate
            parts += _normalized_convolution(inputs, middle, 1, config.dropout)
            inputs = middle
        parts += _normalized_convolution(inputs, config.growth_rate, 3, config.dropout)
        self.new_maps = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new_maps(x)], dim=1)


class CifarDenseNetModel(ImageNetwork):
    """A 3 x 3 convolution and three dense blocks. A transition after each of the first two blocks
    halves the image size. Accepts images of at least 4 x 4 pixels.
    """

    config: CifarDenseNetConfig

    def __init__(self, config: CifarDenseNetConfig) -> None:
        super().__init__(config)
        maps = config.maps
        self.stem = convolution(config.num_channels, maps[0], 3)
        self.stages = nn.ModuleList(
            (
                _dense_block(maps[0], maps[1], config),
                _dense_block(maps[1], maps[2], config),
                _dense_block(maps[2], None, config),
            )
        )
        self.norm = nn.BatchNorm2d(maps[-1])
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        """Raises ValueError for images that are too small for the transitions."""
        height, width = pixel_values.shape[2:]
        if min(height, width) < _LEAST_SIDE:
            raise ValueError(
                f"images have {height} x {width} pixels, but cifar_densenet halves the size twice: "
                f"set data.image.size to {_LEAST_SIDE} or more"
            )
        hidden = self.stem(pixel_values)
        for stage in self.stages:
            hidden = stage(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=F.relu(self.norm(hidden)))


def _dense_block(inputs: int, remaining: int | None, config: CifarDenseNetConfig) -> nn.Sequential:
    """Return a dense block and its transition to `remaining` maps. None means that there is no
    transition.
    """
    parts: list[nn.Module] = []
    for _ in range(config.layers_per_block):
        parts.append(DenseLayer(inputs, config))
        inputs += config.growth_rate
    if remaining is not None:
        parts += _normalized_convolution(inputs, remaining, 1, config.dropout)
        parts.append(nn.AvgPool2d(2))
    return nn.Sequential(*parts)


def _normalized_convolution(
    inputs: int, outputs: int, size: int, dropout: float
) -> tuple[nn.Module, ...]:
    return (
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        convolution(inputs, outputs, size),
        nn.Dropout(dropout),
    )

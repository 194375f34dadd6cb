"""Components shared by the networks: initial weights, layers and configuration checks."""

from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init


class ImageNetwork(PreTrainedModel):
    """Computes `last_hidden_state` [B, `config.hidden_size`, h, w] from normalized images
    [B, C, H, W].

    Initial weights follow He et al. (2015): they are drawn from a normal distribution with variance
    2 / fan. Convolutions use the fan-out, as in the code that the networks' authors published. The
    members of the network's module list are compiled, checkpointed and sharded individually.
    """

    config_class: type[PreTrainedConfig]  # transformers sets this from the annotation of `config`
    main_input_name = "pixel_values"
    input_modalities = "image"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        match module:
            case nn.Conv2d():
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            case nn.Linear():
                init.kaiming_normal_(module.weight, nonlinearity="relu")
            case _:
                super()._init_weights(module)


class FullyConnected(nn.Module):
    """A fully connected layer, batch norm and ReLU: [B, ...] -> [B, outputs, 1, 1]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError if the statistics would be computed from a single row."""
        if type(self.norm) is nn.BatchNorm2d and self.norm.training and len(x) == 1:
            raise ValueError(
                "batch norm of a fully connected layer cannot train on one row at a time: raise "
                "train.global_batch, lower train.micro_batches, or set backbone.batch_norm=frozen"
            )
        return F.relu(self.norm(self.linear(x.flatten(1))[:, :, None, None]))


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with an odd kernel `size` and padding that keeps the image size at
    stride 1. It does not have a bias, because batch norm has one.
    """
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def check_positive(**fields: int | Sequence[int]) -> None:
    """Raise ValueError for a field that is not a positive number or a list of positive numbers."""
    for name, value in fields.items():
        numbers = [value] if isinstance(value, int) else value
        if min(numbers, default=0) < 1:
            raise ValueError(f"{name} is {value}, but only positive numbers are valid")


def check_dropout(dropout: float) -> None:
    """Raise ValueError if `dropout` is not a probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(
            f"dropout is {dropout}, but it must be at least 0 and below 1; 0 disables dropout"
        )


def layers_per_stage(depth: int, *, step: int, outside: int) -> int:
    """Return the n in `depth` = `step` n + `outside`. Raises ValueError if no such n exists."""
    n, rest = divmod(depth - outside, step)
    if rest or n < 1:
        lower = step * max(n, 1) + outside
        raise ValueError(
            f"depth is {depth}, but it must be {step} n + {outside}: use {lower} or {lower + step}"
        )
    return n


@strict
class FixedSizeConfig(PreTrainedConfig):
    """The configuration of a network that accepts only images of a fixed size, because a layer has
    weights for each pixel.
    """

    image_size: int = 32
    num_channels: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        check_positive(image_size=self.image_size, num_channels=self.num_channels)
        super().__post_init__(**kwargs)

    def check_image_size(self, height: int, width: int) -> None:
        """Raise ValueError if `height` and `width`, in pixels, differ from `image_size`."""
        if (height, width) != (self.image_size, self.image_size):
            raise ValueError(
                f"backbone.config.image_size is {self.image_size}, but images have {height} x "
                f"{width} pixels, and {self.model_type} accepts only one size: set image_size to "
                "data.image.size and remove other sizes from data.augment"
            )

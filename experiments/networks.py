"""Small published networks for images like those of MNIST and CIFAR, as transformers models.

`register_networks` makes them available as `backbone.config` of a recipe, by their `model_type`,
through the public registries of transformers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithNoAttention


def register_networks() -> None:
    """Register the networks with `AutoConfig` and `AutoModel`. Safe to call repeatedly."""
    for model_type, model in NETWORKS.items():
        AutoConfig.register(model_type, model.config_class, exist_ok=True)
        AutoModel.register(model.config_class, model, exist_ok=True)


class ImageNetwork(PreTrainedModel):
    """Computes `last_hidden_state` [B, `config.hidden_size`, h, w] from normalized images
    [B, C, H, W]. `layers` are applied in order.

    Initial weights follow He et al. (2015): they are drawn from a normal distribution with variance
    2 / fan. Convolutions use the fan-out, as in the code that the networks' authors published.
    """

    config_class: type[PreTrainedConfig]  # transformers sets this from the annotation of `config`
    main_input_name = "pixel_values"
    input_modalities = "image"
    layers: nn.ModuleList

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        match module:
            case nn.Conv2d():
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            case nn.Linear():
                init.kaiming_normal_(module.weight, nonlinearity="relu")
            case _:
                super()._init_weights(module)

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithNoAttention:
        hidden = pixel_values
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithNoAttention(last_hidden_state=hidden)


def fully_connected(inputs: int, outputs: int) -> nn.Sequential:
    """Return a fully connected layer, batch norm and ReLU: [B, ...] -> [B, outputs, 1, 1]."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, outputs, bias=False),
        nn.Unflatten(1, (outputs, 1, 1)),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with an odd kernel `size` and padding that keeps the image size at
    stride 1. It does not have a bias, because batch norm has one.
    """
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def layers_per_stage(depth: int, *, step: int, outside: int) -> int:
    """Return the n in `depth` = `step` n + `outside`. Raises ValueError if no such n exists."""
    n, rest = divmod(depth - outside, step)
    if rest or n < 1:
        raise ValueError(f"depth is {depth}, but it must be {step} n + {outside}")
    return n


# ---------------------------------------------------------------- Keren, Sabato and Schuller 2019


class MlpConfig(PreTrainedConfig):
    """`hidden_sizes` lists the number of units in each layer."""

    model_type = "mlp"

    image_size: int = 28
    num_channels: int = 1
    hidden_sizes: list[int] | tuple[int, ...] = (500, 500)

    @property
    def hidden_size(self) -> int:
        return self.hidden_sizes[-1]


class MlpModel(ImageNetwork):
    """Fully connected layers, each followed by batch norm and ReLU: the MNIST network in section
    6.1. Features are [B, dim, 1, 1].
    """

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        inputs = (config.num_channels * config.image_size**2, *config.hidden_sizes)
        self.layers = nn.ModuleList(
            fully_connected(before, after)
            for before, after in zip(inputs, config.hidden_sizes, strict=False)
        )
        self.post_init()


class SlcCnnConfig(PreTrainedConfig):
    """`conv_channels` lists the number of feature maps of each of the six convolutions.
    `hidden_size` is the number of units of the dense layer.
    """

    model_type = "slc_cnn"

    image_size: int = 32
    num_channels: int = 3
    conv_channels: list[int] | tuple[int, ...] = (128, 128, 256, 256, 512, 512)
    hidden_size: int = 1024


class SlcCnnModel(ImageNetwork):
    """The SVHN and CIFAR network in section 6.1. Convolutions 1, 3 and 5 are 5 x 5, and the others
    are 1 x 1. Each is followed by batch norm and ReLU. Convolutions 2, 4 and 6 are followed by
    3 x 3 max pooling with stride 2. Features are [B, dim, 1, 1].

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
            inputs, middle, outputs = channels[first : first + 3]
            stage = nn.Sequential(
                *(convolution(inputs, middle, 5), nn.BatchNorm2d(middle), nn.ReLU()),
                *(convolution(middle, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU()),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
            self.layers.append(stage)
            side = (side + 1) // 2
        self.layers.append(fully_connected(channels[-1] * side**2, config.hidden_size))
        self.post_init()


# ---------------------------------------------------------------- He et al. 2016, section 4.2


class CifarResNetConfig(PreTrainedConfig):
    """`depth` counts the layers with weights, including the classifier: 6 n + 2.

    `hidden_sizes` lists the number of feature maps of each of the three stages, in ascending order.
    Each of the last two stages halves the image size.
    """

    model_type = "cifar_resnet"

    depth: int = 20
    hidden_sizes: list[int] | tuple[int, ...] = (16, 32, 64)
    num_channels: int = 3

    @property
    def hidden_size(self) -> int:
        return self.hidden_sizes[-1]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without weights ("option A"): the input subsampled by
    the stride and padded with maps of zeros.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, 3, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(self.norm2(self.conv2(hidden)) + shortcut)


class CifarResNetModel(ImageNetwork):
    """A 3 x 3 convolution and three stages of n blocks. Accepts images of any size."""

    config: CifarResNetConfig

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        blocks = layers_per_stage(config.depth, step=6, outside=2)
        inputs = config.hidden_sizes[0]
        stem = convolution(config.num_channels, inputs, 3)
        self.layers = nn.ModuleList([nn.Sequential(stem, nn.BatchNorm2d(inputs), nn.ReLU())])
        for outputs, stride in zip(config.hidden_sizes, (1, 2, 2), strict=True):
            others = (BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1))
            first = BasicBlock(inputs, outputs, stride=stride)
            self.layers.append(nn.Sequential(first, *others))
            inputs = outputs
        self.post_init()


# ---------------------------------------------------------------- Zagoruyko and Komodakis 2016


class WideResNetConfig(PreTrainedConfig):
    """WRN-`depth`-`width`: `depth` is 6 n + 4, and `width` multiplies the number of maps."""

    model_type = "wide_resnet"

    depth: int = 28
    width: int = 10
    num_channels: int = 3

    @property
    def hidden_size(self) -> int:
        return 4 * 16 * self.width


class PreActivationBlock(nn.Module):
    """A residual block in which batch norm and ReLU precede each convolution. If the number of maps
    changes, the shortcut is a 1 x 1 convolution of the first ReLU's output.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, outputs, 3, stride=stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.shortcut = (
            None if inputs == outputs else convolution(inputs, outputs, 1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        hidden = F.relu(self.norm2(self.conv1(active)))
        return self.conv2(hidden) + (x if self.shortcut is None else self.shortcut(active))


class WideResNetModel(ImageNetwork):
    """A 3 x 3 convolution to 16 maps and three stages of n blocks. Accepts images of any size."""

    config: WideResNetConfig

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        blocks = layers_per_stage(config.depth, step=6, outside=4)
        inputs = 16
        self.layers = nn.ModuleList([convolution(config.num_channels, inputs, 3)])
        for stage, stride in enumerate((1, 2, 2)):
            outputs = 16 * config.width * 2**stage
            first = PreActivationBlock(inputs, outputs, stride=stride)
            others = (PreActivationBlock(outputs, outputs, stride=1) for _ in range(blocks - 1))
            self.layers.append(nn.Sequential(first, *others))
            inputs = outputs
        self.layers.append(nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU()))
        self.post_init()


# ---------------------------------------------------------------- Huang et al. 2017


class CifarDenseNetConfig(PreTrainedConfig):
    """DenseNet-`depth`-`growth_rate`. `growth_rate` is the number of feature maps that a layer
    adds, and `depth` counts the layers with weights, including the classifier: 3 n + 4.
    """

    model_type = "cifar_densenet"

    depth: int = 40
    growth_rate: int = 12
    num_channels: int = 3

    @property
    def layers_per_block(self) -> int:
        return layers_per_stage(self.depth, step=3, outside=4)

    @property
    def maps(self) -> tuple[int, int, int, int]:
        """The number of maps before each dense block and after the last one."""
        grown = self.layers_per_block * self.growth_rate
        return 16, 16 + grown, 16 + 2 * grown, 16 + 3 * grown

    @property
    def hidden_size(self) -> int:
        return self.maps[-1]


class DenseLayer(nn.Module):
    """Appends `growth_rate` maps to its input: [B, C, h, w] -> [B, C + growth, h, w]."""

    def __init__(self, inputs: int, config: CifarDenseNetConfig) -> None:
        super().__init__()
        self.new_maps = nn.Sequential(*_normalized_convolution(inputs, config.growth_rate, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new_maps(x)], dim=1)


class CifarDenseNetModel(ImageNetwork):
    """A 3 x 3 convolution and three dense blocks. A transition after each of the first two blocks
    halves the image size. Accepts images of at least 4 x 4 pixels.
    """

    config: CifarDenseNetConfig

    def __init__(self, config: CifarDenseNetConfig) -> None:
        super().__init__(config)
        first, second, third, last = config.maps
        self.layers = nn.ModuleList(
            (
                convolution(config.num_channels, first, 3),
                _dense_block(first, second, config),
                _dense_block(second, third, config),
                _dense_block(third, None, config),
                nn.Sequential(nn.BatchNorm2d(last), nn.ReLU()),
            )
        )
        self.post_init()


def _dense_block(inputs: int, remaining: int | None, config: CifarDenseNetConfig) -> nn.Sequential:
    """Return a dense block and its transition to `remaining` maps. None means that there is no
    transition.
    """
    parts: list[nn.Module] = []
    for _ in range(config.layers_per_block):
        parts.append(DenseLayer(inputs, config))
        inputs += config.growth_rate
    if remaining is not None:
        parts += _normalized_convolution(inputs, remaining, 1)
        parts.append(nn.AvgPool2d(2))
    return nn.Sequential(*parts)


def _normalized_convolution(inputs: int, outputs: int, size: int) -> tuple[nn.Module, ...]:
    return nn.BatchNorm2d(inputs), nn.ReLU(), convolution(inputs, outputs, size)


NETWORKS: dict[str, type[ImageNetwork]] = {
    model.config_class.model_type: model
    for model in (MlpModel, SlcCnnModel, CifarResNetModel, WideResNetModel, CifarDenseNetModel)
}

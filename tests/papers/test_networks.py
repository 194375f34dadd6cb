"""The published networks have the sizes and the layers that their papers state, and train."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from data.images.config import ImageConfig
from experiments.networks import NETWORKS, register_networks
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.blocks import repeated_blocks
from trainer.backbone.config import BackboneConfig

# For gray images of 16 x 16 pixels.
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden_sizes": [24, 16], "image_size": 16},
    "slc_cnn": {"conv_channels": [4, 5, 6, 7, 8, 9], "hidden_size": 16, "image_size": 16},
    "cifar_resnet": {"depth": 8, "hidden_sizes": [4, 6, 8]},
    "wide_resnet": {"depth": 10, "width": 2},
    "cifar_densenet": {"depth": 10, "growth_rate": 4},
}
register_networks()


def small(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "num_channels": 1, **SMALL[model_type]}


def build(config: dict[str, Any], size: int = 16) -> Backbone:
    image = ImageConfig(size=size, channels=1, mean=(0.5,), std=(0.25,))
    image = image if config.get("num_channels") == 1 else ImageConfig(size=size)
    return build_backbone(BackboneConfig(config=config), image=image)


def published(model_type: str, **fields: Any) -> Backbone:
    """Return a network on the meta device, for the image size used in its paper."""
    size, channels = (28, 1) if model_type == "mlp" else (32, 3)
    with torch.device("meta"):
        return build({"model_type": model_type, "num_channels": channels, **fields}, size)


def num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def noise(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, 1, 16, 16)
    return {"pixel_values": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}


def test_no_network_shadows_a_transformers_model() -> None:
    assert not NETWORKS.keys() & set(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("model_type", "fields", "num_classes", "millions"),
    [
        ("cifar_resnet", {"depth": 20}, 10, "0.27"),  # He et al. (2016), table 6
        ("cifar_resnet", {"depth": 110}, 10, "1.7"),
        ("wide_resnet", {}, 100, "36.5"),  # Zagoruyko and Komodakis (2016), tables 4 and 5
        ("wide_resnet", {"depth": 40, "width": 1}, 10, "0.6"),
        ("cifar_densenet", {}, 10, "1.0"),  # Huang et al. (2017), table 2
        ("cifar_densenet", {"depth": 100}, 10, "7.0"),
    ],
)
def test_a_network_has_as_many_weights_as_its_paper_reports(
    model_type: str, fields: dict[str, Any], num_classes: int, millions: str
) -> None:
    """The number covers all trained parameters, including the classifier with its biases."""
    backbone = published(model_type, **fields)
    count = num_weights(backbone) + num_classes * (backbone.dim + 1)
    assert f"{count / 1e6:.{len(millions.partition('.')[2])}f}" == millions


def test_the_networks_for_single_logit_classification_have_the_layers_given_in_the_paper() -> None:
    mlp, cnn = published("mlp"), published("slc_cnn")
    assert num_weights(mlp) == 28 * 28 * 500 + 500 * 500 + 2 * (500 + 500)
    convolutions = [part for part in cnn.modules() if isinstance(part, nn.Conv2d)]
    channels = [(part.out_channels, *part.kernel_size) for part in convolutions]
    assert channels == [(c, k, k) for c in (128, 256, 512) for k in (5, 1)]
    dense = [part for part in cnn.modules() if isinstance(part, nn.Linear)]
    assert [(part.in_features, part.out_features) for part in dense] == [(512 * 4 * 4, 1024)]


@pytest.mark.parametrize("model_type", SMALL)
def test_every_weight_gets_a_gradient_and_all_are_in_blocks(model_type: str) -> None:
    """FSDP gathers weights outside the blocks with the root module."""
    torch.manual_seed(0)
    backbone = build(small(model_type)).train()
    found = backbone(noise(5))
    (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in backbone.parameters())
    whole = published(model_type)
    in_blocks = sum(num_weights(block) for block in repeated_blocks(whole.encoder))
    assert in_blocks == num_weights(whole)


def test_initial_weights_have_the_variance_proposed_by_he_et_al() -> None:
    cnn = build({"model_type": "slc_cnn", "num_channels": 1, "image_size": 16})
    for part in cnn.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            is_conv = isinstance(part, nn.Conv2d)
            fan = part.out_channels * part.kernel_size[0] ** 2 if is_conv else part.in_features
            assert float(part.weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05)

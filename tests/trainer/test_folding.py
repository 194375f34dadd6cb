"""Batch norms that are folded into convolutions."""

import pytest
import torch
from torch import Tensor, nn

from data.images.config import ImageConfig
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.backbone.config import BackboneConfig
from trainer.backbone.precision import fold_batch_norms

IMAGE = ImageConfig(size=16, channels=3)
CONFIGS = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4},
}


def with_statistics(backbone: Backbone) -> Backbone:
    """Give each batch norm random statistics, weights and biases."""
    draw = torch.Generator().manual_seed(0)
    for norm in (part for part in backbone.modules() if isinstance(part, nn.BatchNorm2d)):
        for tensor in (norm.running_var, norm.weight):
            tensor.data = torch.rand(tensor.shape, generator=draw) + 0.5
        for tensor in (norm.running_mean, norm.bias):
            tensor.data = torch.randn(tensor.shape, generator=draw) / 4
    return backbone.eval()


def pixels() -> dict[str, Tensor]:
    shape, draw = (3, 3, 16, 16), torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_folding_keeps_the_features_and_removes_batch_norms(kind: str) -> None:
    torch.manual_seed(0)
    config = BackboneConfig(config={"model_type": kind, **CONFIGS[kind]})
    backbone = with_statistics(build_backbone(config, image=IMAGE))
    with torch.inference_mode():
        expected = backbone(pixels())
        fold_batch_norms(backbone, pixels())
        torch.testing.assert_close(backbone(pixels()), expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in backbone.modules())


class _NormFirst(nn.Module):
    """Applies the batch norm before the convolution that is defined before it."""

    dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(3, self.dim)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.last(self.conv(self.norm(pixels)).mean((2, 3)))


def test_a_batch_norm_that_is_applied_before_the_convolution_is_kept() -> None:
    torch.manual_seed(0)
    backbone = with_statistics(Backbone(_NormFirst(), pooling="auto", image=IMAGE))
    with torch.inference_mode():
        expected = backbone(pixels())
        fold_batch_norms(backbone, pixels())
        torch.testing.assert_close(backbone(pixels()), expected)
    assert isinstance(backbone.encoder.norm, nn.BatchNorm2d)

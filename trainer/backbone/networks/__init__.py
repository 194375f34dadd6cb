"""The small published networks for pictures such as MNIST's and CIFAR's, as transformers models."""

from trainer.backbone.networks.fields import FixedSizeConfig
from trainer.backbone.networks.registry import NETWORKS, register_networks

__all__ = ["NETWORKS", "FixedSizeConfig", "register_networks"]

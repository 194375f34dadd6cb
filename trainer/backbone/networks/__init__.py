"""The small published networks for images such as MNIST's and CIFAR's, as transformers models.

`NETWORKS` is the registry, by `model_type`.
"""

from transformers import AutoConfig, AutoModel

from trainer.backbone.networks.base import FixedSizeConfig, ImageNetwork
from trainer.backbone.networks.cifar_densenet import CifarDenseNetModel
from trainer.backbone.networks.cifar_resnet import CifarResNetModel
from trainer.backbone.networks.mlp import MlpModel
from trainer.backbone.networks.slc_cnn import SlcCnnModel
from trainer.backbone.networks.wide_resnet import WideResNetModel

__all__ = ["NETWORKS", "FixedSizeConfig", "register_networks"]

NETWORKS: dict[str, type[ImageNetwork]] = {
    model.config_class.model_type: model
    for model in (MlpModel, SlcCnnModel, CifarResNetModel, WideResNetModel, CifarDenseNetModel)
}


def register_networks() -> None:
    """Let `AutoConfig` and `AutoModel` make the networks, as often as it is called."""
    for model_type, model in NETWORKS.items():
        # A bundle's `mlp` stays ours, should a later transformers have one.
        AutoConfig.register(model_type, model.config_class, exist_ok=True)
        AutoModel.register(model.config_class, model, exist_ok=True)

"""Small published networks for images like those of MNIST and CIFAR, as transformers models.

`NETWORKS` is the registry of networks by `model_type`.
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
    """Register the networks with `AutoConfig` and `AutoModel`. Safe to call repeatedly."""
    for model_type, model in NETWORKS.items():
        # With exist_ok, our model takes precedence if a later version of transformers has a model
        # of the same name.
        AutoConfig.register(model_type, model.config_class, exist_ok=True)
        AutoModel.register(model.config_class, model, exist_ok=True)

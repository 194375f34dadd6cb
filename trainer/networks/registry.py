"""The networks by `model_type`, and how transformers learns of them."""

from transformers import AutoConfig, AutoModel

from trainer.networks.base import PictureNetwork
from trainer.networks.cifar_densenet import CifarDenseNetModel
from trainer.networks.cifar_resnet import CifarResNetModel
from trainer.networks.mlp import MlpModel
from trainer.networks.slc_cnn import SlcCnnModel
from trainer.networks.wide_resnet import WideResNetModel

NETWORKS: dict[str, type[PictureNetwork]] = {
    model.config_class.model_type: model
    for model in (MlpModel, SlcCnnModel, CifarResNetModel, WideResNetModel, CifarDenseNetModel)
}


def register_networks() -> None:
    """Let `AutoConfig` and `AutoModel` make the networks, as often as it is called."""
    for model_type, model in NETWORKS.items():
        # A bundle's `mlp` stays ours, should a later transformers have one.
        AutoConfig.register(model_type, model.config_class, exist_ok=True)
        AutoModel.register(model.config_class, model, exist_ok=True)

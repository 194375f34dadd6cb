"""The networks by `model_type`, and how transformers learns of them."""

from transformers import AutoConfig, AutoModel, PreTrainedConfig

from trainer.networks.base import PictureNetwork
from trainer.networks.cifar_densenet import CifarDenseNetConfig, CifarDenseNetModel
from trainer.networks.cifar_resnet import CifarResNetConfig, CifarResNetModel
from trainer.networks.mlp import MlpConfig, MlpModel
from trainer.networks.slc_cnn import SlcCnnConfig, SlcCnnModel
from trainer.networks.wide_resnet import WideResNetConfig, WideResNetModel

NETWORKS: dict[str, tuple[type[PreTrainedConfig], type[PictureNetwork]]] = {
    "mlp": (MlpConfig, MlpModel),
    "slc_cnn": (SlcCnnConfig, SlcCnnModel),
    "cifar_resnet": (CifarResNetConfig, CifarResNetModel),
    "wide_resnet": (WideResNetConfig, WideResNetModel),
    "cifar_densenet": (CifarDenseNetConfig, CifarDenseNetModel),
}


def register_networks() -> None:
    """Let `AutoConfig` and `AutoModel` make the networks, as often as it is called."""
    for model_type, (config, model) in NETWORKS.items():
        # A bundle's `mlp` stays ours, should a later transformers have one.
        AutoConfig.register(model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)

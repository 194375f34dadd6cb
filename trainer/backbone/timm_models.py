"""Checks of timm models, which transformers builds with `timm.create_model`."""

import re
from typing import Any

from transformers import PretrainedConfig

_MODEL_TYPE = "timm_wrapper"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
# Arguments with which `timm.create_model` reads files (also pickles) or downloads.
_UNSAFE = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def is_timm(config: PretrainedConfig) -> bool:
    """Return whether a configuration describes a timm model."""
    return bool(config.model_type == _MODEL_TYPE)


def check_timm(config: PretrainedConfig) -> None:
    """Raise ValueError if creating a timm model would read files or contact the hub."""
    if not is_timm(config):
        return
    name, arguments = config.architecture, config.model_args or {}
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"architecture is {name!r}: use the name of a timm model, such as resnet50.a1_in1k"
        )
    for key in arguments.keys() & set(_UNSAFE):
        raise ValueError(f"model_args of timm model {name} contains {key}: remove it")


def without_head_arguments(config: PretrainedConfig) -> None:
    """Remove the number of classes from the arguments of a timm model, in place.

    timm saves all arguments with which a model was created, and transformers passes the number of
    classes a second time. The weights are in the same folder, so `pretrained` is not needed.
    """
    arguments: dict[str, Any] = config.model_args or {}
    dropped = ("num_classes", "pretrained")
    config.model_args = {key: each for key, each in arguments.items() if key not in dropped}

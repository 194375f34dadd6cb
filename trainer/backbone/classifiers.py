"""Trained classifiers of transformers (`…ForImageClassification`, `…ForSequenceClassification`) as
backbones.

A classifier computes its logits with one last linear layer. Replaced by the identity, the model
returns the input of that layer, the features, and the rows and biases of the layer are class
weights. Everything before the layer, such as a pooler or a dense layer, stays in the backbone.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Features(nn.Identity):
    """Replaces the last linear layer of a classifier. Its output has `dim` features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def classifier_class(config: "PretrainedConfig") -> Any:
    """Return the class of transformers that loads the classifiers with this configuration.

    Raises ValueError if `config` does not describe a classifier of images or texts.
    """
    from transformers import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )

    kinds: tuple[tuple[Any, Any], ...] = (
        (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification),
        (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
    )
    for mapping, auto in kinds:
        models = mapping.get(type(config), ())
        names = {model.__name__ for model in (models if isinstance(models, tuple) else (models,))}
        if names and (not config.architectures or names & set(config.architectures)):
            return auto
    architecture = (config.architectures or [config.model_type])[0]
    raise ValueError(
        f"{architecture} is not a classifier of images or texts: use a model whose architecture "
        "ends with ForImageClassification or ForSequenceClassification"
    )


def reads_texts(model: "PreTrainedModel") -> bool:
    """Return whether a classifier reads token IDs instead of pixels."""
    return bool(model.main_input_name == "input_ids")


def take_last_layer(model: "PreTrainedModel") -> nn.Linear:
    """Replace the last linear layer of a classifier with `Features` and return it.

    Raises ValueError if the model does not end with a linear layer that computes one logit per
    class.
    """
    num_classes = model.config.num_labels
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not end with a linear layer that computes one logit for "
            f"each of its {num_classes} classes, so it has no class weights"
        )
    # Modules are registered in the order in which they are applied, so the last one is the
    # classifier, also if the hidden size equals the number of classes.
    name, layer = found[-1]
    model.set_submodule(name, Features(layer.in_features))
    return layer

"""Initial weights of a run that come from a bundle: `backbone.init` and `head.init` of a recipe."""

from collections.abc import Sequence
from pathlib import Path

import torch

from data.images.config import ImageConfig
from heads import ClassHead
from trainer.backbone.backbone import Backbone, load_weights
from trainer.bundle.bundle import Bundle
from trainer.config import Recipe

_CLASSES_AT_ONCE = 65_536


def load_initial_weights(
    backbone: Backbone, head: ClassHead, recipe: Recipe, class_names: Sequence[str]
) -> None:
    """Load the weights of the bundles that the recipe names, if any.

    Raises ValueError, naming the setting, if a bundle does not match the recipe.
    """
    if recipe.backbone.init is not None:
        image = recipe.data.image if backbone.modality == "image" else None
        _load_backbone(backbone, recipe.backbone.init, image)
    if recipe.head.init is not None:
        with Bundle.open(recipe.head.init) as bundle:
            _load_rows(head, bundle, class_names)


def _load_backbone(backbone: Backbone, path: Path, image: ImageConfig | None) -> None:
    with Bundle.open(path) as bundle:
        own = bundle.spec.image
        if image is not None and own is not None:
            for key in ("channels", "mean", "std"):
                if (expected := getattr(own, key)) != getattr(image, key):
                    raise ValueError(
                        f"data.image.{key} is {getattr(image, key)}, but the backbone of {path} "
                        f"was trained with {expected}: set data.image.{key} to this value"
                    )
    load_weights(backbone, path, source="the backbone of the recipe")


@torch.no_grad()
def _load_rows(head: ClassHead, bundle: Bundle, class_names: Sequence[str]) -> None:
    """Load the rows and biases of this rank's classes that the bundle contains, by name."""
    _check_head(head, bundle)
    mine = head.engine.weights.held.class_ids.tolist()
    found = [bundle.names.find(class_names[class_id]) for class_id in mine]
    pairs = [(position, own) for position, own in enumerate(found) if own is not None]
    if mine and not any(bundle.names.find(name) is not None for name in class_names):
        raise ValueError(
            f"head.init is {bundle.path}, which has none of the classes of the shards, such as "
            f"{class_names[0]!r}: classes are matched by name"
        )
    for start in range(0, len(pairs), _CLASSES_AT_ONCE):
        positions, ids = zip(*pairs[start : start + _CLASSES_AT_ONCE], strict=True)
        rows = bundle.rows(ids).to(head.weight.device)
        head.weight[list(positions)] = rows.rows.to(head.weight.dtype)
        if head.bias is not None:
            bias = 0.0 if rows.bias is None else rows.bias.to(head.bias.dtype)
            head.bias[list(positions)] = bias


def _check_head(head: ClassHead, bundle: Bundle) -> None:
    spec, path = bundle.spec, bundle.path
    if spec.dim != head.dim:
        raise ValueError(
            f"head.init is {path}, whose rows have {spec.dim} features, but the backbone has "
            f"{head.dim}: set backbone.init to the same bundle"
        )
    if spec.bias and head.bias is None:
        raise ValueError(f"head.init is {path}, whose classes have a bias: set head.bias=true")
    own = head.evaluated_map()
    if own != spec.logits:
        logits = spec.logits
        raise ValueError(
            f"head.init is {path}, which was trained with {logits.kind} logits, scale "
            f"{logits.scale:g} and offset {logits.offset:g}, but head.logits has {own.kind}, "
            f"{own.scale:g} and {own.offset:g}: set head.logits to the values of the bundle"
        )

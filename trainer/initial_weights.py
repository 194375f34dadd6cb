"""Initial weights of a run that come from a bundle: `backbone.init` and `head.init` of a recipe."""

from pathlib import Path

import numpy as np
import torch

from data.classes.strings import CHUNK, Strings
from data.images.config import ImageConfig
from heads import ClassHead
from heads.collectives import all_reduce_sum
from trainer.backbone.backbone import Backbone, load_weights
from trainer.bundle.bundle import Bundle
from trainer.config import Recipe

_CLASSES_AT_ONCE = 65_536


def load_initial_weights(
    backbone: Backbone, head: ClassHead, recipe: Recipe, class_names: Strings
) -> int | None:
    """Load the weights of the bundles that the recipe names, if any (collective).

    Returns the number of classes whose rows were loaded, or None without a bundle. Raises
    ValueError, naming the setting, if a bundle does not match the recipe, on every rank.
    """
    if recipe.backbone.init is not None:
        image = recipe.data.image if backbone.modality == "image" else None
        _load_backbone(backbone, recipe.backbone.init, image)
    if recipe.head.init is None or recipe.head.init == "means":
        return None
    with Bundle.open(recipe.head.init) as bundle:
        return _load_rows(head, bundle, class_names, min_share=recipe.head.min_init_share)


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
def _load_rows(head: ClassHead, bundle: Bundle, class_names: Strings, *, min_share: float) -> int:
    """Load the rows and biases of this rank's classes that the bundle contains, by name. Returns
    the number of such classes of all ranks."""
    _check_head(head, bundle)
    mine, device = head.engine.weights.held.class_ids.cpu().numpy(), head.weight.device
    found = [
        bundle.classes.find_all(class_names.at(mine[start : start + CHUNK]))
        for start in range(0, len(mine), CHUNK)
    ]
    ids = np.concatenate([np.zeros(0, np.int32), *found])
    held = np.flatnonzero(ids >= 0)
    num_found = int(all_reduce_sum(torch.tensor(len(held), device=device), head.engine.class_group))
    if num_found < min_share * len(class_names):
        example = ""
        if len(held) < len(mine):
            unknown = class_names[int(mine[np.argmin(ids)])]
            example = f", but not {unknown!r}, for example"
        raise ValueError(
            f"head.init is {bundle.path}, which has rows for {num_found} of the {len(class_names)} "
            f"classes of the shards{example}: classes are matched by name; to start the others "
            "from random rows, lower head.min_init_share"
        )
    for start in range(0, len(held), _CLASSES_AT_ONCE):
        some = held[start : start + _CLASSES_AT_ONCE]
        positions, rows = torch.from_numpy(some).to(device), bundle.rows(ids[some].tolist())
        head.weight[positions] = rows.rows.to(device, head.weight.dtype)
        if head.bias is not None:
            bias = 0.0 if rows.bias is None else rows.bias.to(device, head.bias.dtype)
            head.bias[positions] = bias
    return num_found


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

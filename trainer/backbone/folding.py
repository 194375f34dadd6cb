"""Batch norms folded into convolutions, for faster inference on CPUs."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trainer.backbone.backbone import Backbone

# The largest change of a feature, relative to the largest feature, that rounding can explain.
_TOLERANCE = 1e-4


@torch.no_grad()  # not inference_mode: torch's bf16 convolutions fail with weights created in it
def fold_batch_norms(backbone: Backbone, example: dict[str, Tensor]) -> None:
    """Fold each batch norm of a backbone in evaluation mode into the convolution that is defined
    before it in the same module, and use convolutions in channels-last format.

    The order of definition need not be the order of computation. If the features of `example`
    change, the batch norms are kept.
    """
    pairs = list(_pairs(backbone))
    if not pairs:
        return
    try:
        expected = backbone(example)
    except (RuntimeError, IndexError):
        return  # the files do not match; the self-check of the model reports it
    for parent, (name, conv), (norm_name, norm) in pairs:
        setattr(parent, name, fuse_conv_bn_eval(conv, norm))
        setattr(parent, norm_name, nn.Identity())
    change = (backbone(example) - expected).abs().max()
    if not change <= _TOLERANCE * expected.abs().max():  # also true for NaN
        for parent, (name, conv), (norm_name, norm) in pairs:
            setattr(parent, name, conv)
            setattr(parent, norm_name, norm)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backbone.channels_last = True


def _pairs(
    backbone: nn.Module,
) -> Iterator[tuple[nn.Module, tuple[str, nn.Conv2d], tuple[str, nn.BatchNorm2d]]]:
    for parent in backbone.modules():
        for (name, conv), (norm_name, norm) in pairwise(parent.named_children()):
            if (
                isinstance(conv, nn.Conv2d)
                and isinstance(norm, nn.BatchNorm2d)
                and norm.num_features == conv.out_channels
            ):
                yield parent, (name, conv), (norm_name, norm)

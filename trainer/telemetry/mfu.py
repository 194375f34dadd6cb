"""MFU: the share of a device's peak that goes into the operations of the model (PaLM, app. B).

Operations are counted once a shape of input on tensors without memory, so the count is the same
under every strategy and costs a step nothing. What is computed twice (checkpointed activations,
cached gradients) counts once.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from data.images.config import ImageConfig
from data.messages import one_line
from heads.config import HeadConfig
from trainer.backbone.backbone import Backbone, build_backbone
from trainer.config import BackboneOptions, Recipe
from trainer.devices import Precision, device_named

# A multiplication and an addition forward, two of each backward: of the weights, of the inputs.
_PASSES = 3
# Batch norm takes no single row.
_ROWS = 2


class ModelFlops:
    """Operations that training on rows of a recipe takes: multiplications and additions, backbone
    and head. `per_row` is asked for the shapes of inputs as they come; till then nothing is made.
    """

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.precision: Precision = recipe.train.precision
        self._recipe, self._num_classes = recipe, num_classes
        self._counted: dict[tuple[int, ...], float] = {}

    def per_row(self, inputs: dict[str, Tensor]) -> float | None:
        """Operations a row of `inputs`, [b, ...] each; None: the head's have no formula.

        Raises RuntimeError where the encoder looks at values, which a count has none of.
        """
        backbone, head = self._backbone, self._recipe.head
        of_head = head_flops(head, dim=backbone.dim, num_classes=self._num_classes)
        if of_head is None:
            return None
        shape = next(iter(inputs.values())).shape[1:]
        if shape not in self._counted:
            self._counted[shape] = _PASSES * forward_flops(backbone, inputs)
        return self._counted[shape] + of_head

    @cached_property
    def _backbone(self) -> Backbone:
        return _without_memory(self._recipe.backbone, self._recipe.data.image)


def forward_flops(backbone: Backbone, inputs: dict[str, Tensor]) -> float:
    """Operations of a forward pass of one row of `inputs`, by a backbone on the meta device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"), mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        rows = {
            name: torch.ones(_ROWS, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in inputs.items()
        }
        backbone(rows)
    return counter.get_total_flops() / _ROWS


def head_flops(head: HeadConfig, *, dim: int, num_classes: int) -> float | None:
    """Operations of training the head on one row: 6 d a class whose logit it makes, over all ranks.

    None for heads that make no row of logits (factored, hierarchical softmax).
    """
    if head.weights.kind == "factored" or head.loss.over_nodes:
        return None
    sampled = head.loss.sampled(num_classes, num_labels=0)
    classes = num_classes if sampled is None else min(sampled, num_classes)
    return 2.0 * _PASSES * dim * classes


def _without_memory(config: BackboneOptions, image: ImageConfig | None) -> Backbone:
    with torch.device("meta"):
        return build_backbone(config.without_weights(), image=image)


def peak_flops(
    device: torch.device, precision: Precision, given_tflops: float | None
) -> float | None:
    """Operations a second that `device` can do at most; None where nobody has said.

    `given_tflops` of the recipe goes before the table of devices.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    known = device_named(torch.cuda.get_device_name(device))
    return None if known is None else known.peak_flops(precision)


class Utilization:
    """Adds up the operations of this rank's rows; there is none where no peak is known."""

    def __init__(
        self, flops: ModelFlops | None, peak: float | None, print_line: Callable[[str], None]
    ) -> None:
        self._flops, self._peak, self._print_line = flops, peak, print_line
        self._operations = 0.0

    def add(self, inputs: dict[str, Tensor]) -> None:
        """Rows [b, ...] that this rank trained on."""
        if self._flops is None or self._peak is None:
            return
        try:
            per_row = self._flops.per_row(inputs)
        except RuntimeError as error:
            self._give_up(
                f"the operations of the encoder cannot be counted ({one_line(error, 200)})"
            )
            return
        if per_row is None:
            self._give_up("this head makes no row of logits")
            return
        self._operations += per_row * len(next(iter(inputs.values())))

    def take(self, seconds: float) -> float | None:
        """The share of the peak over `seconds`, since the last call; None: not known."""
        if self._flops is None or self._peak is None:
            return None
        share = self._operations / seconds / self._peak
        self._operations = 0.0
        return share

    def _give_up(self, reason: str) -> None:
        self._peak = None
        self._print_line(f"no MFU: {reason}")

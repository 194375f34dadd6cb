"""Model FLOPS utilization (MFU): the rate of the model's operations as a fraction of the device's
peak rate (PaLM, appendix B).

Operations are counted once per input shape, using fake tensors. The count is therefore the same
under every strategy, and counting does not slow down training steps. Recomputation (activation
checkpointing, gradient caching) is not counted.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from data.messages import one_line
from heads.config import HeadConfig
from trainer.backbone.trace import FakeBackbone
from trainer.config import Recipe
from trainer.devices import Precision, device_named

# The backward pass requires twice as many operations as the forward pass, because it computes the
# gradients of the weights and of the inputs.
_PASSES = 3
# Batch norm does not accept a single row.
_ROWS = 2


class ModelFlops:
    """Counts the operations (multiplications and additions) per row for training a recipe's
    backbone and head. The first call to `per_row` builds the model used for counting.
    """

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.precision: Precision = recipe.train.precision
        self._recipe, self._num_classes = recipe, num_classes
        self._counted: dict[tuple[int, ...], float] = {}

    def per_row(self, inputs: dict[str, Tensor]) -> float | None:
        """Return the number of operations per row of `inputs`, each [b, ...], or None if there is
        no formula for the head.

        Raises RuntimeError if the encoder depends on the values of its inputs, because fake tensors
        do not have values.
        """
        head, dim = self._recipe.head, self._fake.backbone.dim
        of_head = head_flops(head, dim=dim, num_classes=self._num_classes)
        if of_head is None:
            return None
        shape = next(iter(inputs.values())).shape[1:]
        if shape not in self._counted:
            forward = self._fake.forward_flops(inputs, rows=_ROWS)
            self._counted[shape] = _PASSES * forward / _ROWS
        return self._counted[shape] + of_head

    @cached_property
    def _fake(self) -> FakeBackbone:
        return FakeBackbone(self._recipe.backbone, self._recipe.data.image)


def head_flops(head: HeadConfig, *, dim: int, num_classes: int) -> float | None:
    """Return the number of operations for training the head on one row, over all ranks: 6 d for
    each class whose logit the head computes.

    Returns None for heads that do not compute a row of logits (factored, hierarchical softmax).
    """
    if head.weights.kind == "factored" or head.loss.over_nodes:
        return None
    sampled = head.loss.sampled(num_classes, num_labels=0)
    classes = num_classes if sampled is None else min(sampled, num_classes)
    return 2.0 * _PASSES * dim * classes


class Utilization:
    """Sums the operations of this rank's rows. Does not report MFU if the peak rate is unknown.

    The peak rate is that of `device`, or `peak_tflops` if it is given.
    """

    def __init__(
        self,
        flops: ModelFlops | None,
        device: torch.device,
        peak_tflops: float | None,
        *,
        print_line: Callable[[str], None],
    ) -> None:
        self._flops, self._print_line = flops, print_line
        self._peak = None if flops is None else peak_flops(device, flops.precision, peak_tflops)
        self._operations = 0.0

    def add(self, inputs: dict[str, Tensor]) -> None:
        """Count rows [b, ...] on which this rank trained."""
        if self._flops is None or self._peak is None:
            return
        try:
            per_row = self._flops.per_row(inputs)
        except RuntimeError as error:
            per_row = None
            reason = f"the encoder's operations cannot be counted ({one_line(error, 200)})"
        else:
            reason = "this head does not compute rows of logits"
        if per_row is None:
            self._peak = None
            self._print_line(f"MFU is not reported: {reason}")
        else:
            self._operations += per_row * len(next(iter(inputs.values())))

    def take(self, seconds: float) -> float | None:
        """Return the MFU over the `seconds` since the last call, or None if it is unknown."""
        if self._peak is None:
            return None
        operations, self._operations = self._operations, 0.0
        return operations / seconds / self._peak


def peak_flops(
    device: torch.device, precision: Precision, override_tflops: float | None
) -> float | None:
    """Return the peak rate of `device` in operations per second, or None if it is unknown.

    `override_tflops`, which comes from the recipe, takes precedence over the table of devices.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    known = device_named(torch.cuda.get_device_name(device))
    return None if known is None else known.peak_flops(precision)

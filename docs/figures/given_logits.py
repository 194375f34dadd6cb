"""The value and gradient of a loss for given logits, computed by a `ClassHead`.

The features are unit vectors, so the class weights are the logits, and the gradient of the weights
is the gradient of the logits.
"""

import torch
from torch import Tensor

from heads import ClassHead, Loss


def value_and_gradient(loss: Loss, logits_BK: Tensor, labels_B: Tensor) -> tuple[float, Tensor]:
    """Return the loss, which is the mean over the rows, and its gradient [B, K] in float64."""
    num_rows, num_classes = logits_BK.shape
    head = ClassHead(num_rows, num_classes, loss, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(logits_BK.T)
    result = head(torch.eye(num_rows, dtype=torch.float64), labels_B)
    result.backward()
    assert head.weight.grad is not None
    return result.item(), head.weight.grad.T

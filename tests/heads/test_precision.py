"""With bf16 autocast, only the inputs of matrix products are rounded to bf16.

The reference computes in float64 from the same inputs: features, class rows and gradients of the
logits, each rounded to bf16. If the products were rounded, too, the errors of each logit and of
each block's gradient would be up to 0.4%, far above the tolerances.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from heads import ClassHead, CrossEntropy


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().double()


def make_head(num_classes: int, dim: int, *, bias: bool = False) -> ClassHead:
    return ClassHead(dim, num_classes, CrossEntropy(), bias=bias, init_std=1.0, seed=1)


def step(head: ClassHead, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the features, and accumulate the weight's gradient."""
    features = features.clone().requires_grad_()
    with torch.autocast(features.device.type, dtype=torch.bfloat16):
        loss = head(features, labels)
    loss.backward()
    return loss.detach(), features.grad


def reference(head: ClassHead, features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of logits, features and weight."""
    factors, rows = rounded(features), rounded(head.weight.detach())
    logits = factors @ rows.T
    if head.bias is not None:
        logits += head.bias.detach()
    loss = (logits.logsumexp(1) - logits.gather(1, labels[:, None]).squeeze(1)).mean()
    by_logits = (logits.softmax(1) - one_hot(labels, head.num_classes)) / len(labels)
    return loss, by_logits, rounded(by_logits) @ rows, rounded(by_logits).T @ factors


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def random_batch(num_rows: int, dim: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, dim, generator=generator)
    return features, torch.randint(num_classes, (num_rows,), generator=generator)


def test_the_gradient_of_a_well_classified_row_is_accurate():
    """Its probability is nearly 1, so the gradient of its true logit is the small difference
    p - 1. The gradient of the bias is the sum of the gradients of the logits."""
    head = make_head(50, 64, bias=True)
    with torch.no_grad():
        head.bias.copy_(torch.linspace(-1, 1, 50))
    for label in (7, 28, 35):
        features = head.weight.detach()[label : label + 1] / 6
        labels = torch.tensor([label])
        step(head, features, labels)
        _, by_logits, *_ = reference(head, features, labels)
        assert 0.001 < -float(by_logits[0, label]) < 0.02
        torch.testing.assert_close(
            head.bias.grad[label].double(), by_logits[0, label], rtol=5e-4, atol=0
        )
        head.zero_grad()


@pytest.mark.parametrize("memory_bytes", [1, 1 << 28], ids=["100 blocks", "one block"])
def test_gradients_are_accumulated_in_float32_over_blocks_and_micro_batches(memory_bytes):
    head = make_head(6_400, 16)
    object.__setattr__(head.engine, "memory_bytes", memory_bytes)
    total = torch.zeros(6_400, 16, dtype=torch.float64)
    for micro_batch in range(8):
        features, labels = random_batch(32, 16, 6_400, seed=micro_batch)
        loss, by_features = step(head, features, labels)
        want, _, want_by_features, by_weight = reference(head, features, labels)
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
        assert relative_error(by_features, want_by_features) < 2e-4
        total += by_weight
    assert relative_error(head.weight.grad, total) < 2e-4

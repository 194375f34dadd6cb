"""A gradient is computed only if it is required."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads import ClassHead, Dot, FusedSGD
from heads.losses import CrossEntropy
from tests.heads.cases import label_tree, problem

ROWS, DIM, CLASSES = 6, 5, 150
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


def batch() -> tuple[Tensor, Tensor]:
    features, labels, _ = problem(label_tree("dense", CLASSES), num_rows=ROWS, dim=DIM)
    return features, labels


class Recorder(TorchDispatchMode):
    """Counts matrix products and records the size of the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.num_products += function.overloadpacket in PRODUCTS
        if isinstance(result, Tensor) and not function.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(
    ("of_features", "of_weight", "num_products"),
    [(True, True, 3), (False, True, 2), (True, False, 2)],
)
def test_frozen_features_or_weights_save_one_matrix_product(of_features, of_weight, num_products):
    features, labels = batch()
    head = ClassHead(DIM, CLASSES, CrossEntropy()).requires_grad_(of_weight)
    with Recorder() as recorder:
        head(features.float().requires_grad_(of_features), labels).backward()
    assert recorder.num_products == num_products


@pytest.mark.parametrize("fuses", [False, True], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("name", ["bias", "log_scale", "offset"])
def test_a_frozen_weight_costs_nothing_if_another_parameter_is_learned(name, fuses):
    features, labels = batch()
    logits = Dot(scale=1.5, learn_scale=True, learn_offset=True)
    head = ClassHead(DIM, CLASSES, CrossEntropy(), logits=logits, dtype=torch.float64)
    for each, parameter in head.named_parameters():
        parameter.requires_grad_(each == name)
    if fuses:
        FusedSGD(head, lr=1.0)
    object.__setattr__(head.engine, "memory_bytes", 1)  # blocks of 64 classes
    with Recorder() as recorder:
        head(features, labels).backward()
    assert recorder.largest < head.weight.numel()
    # The logits of three blocks, twice; the gradient of the scale needs that of the features.
    assert recorder.num_products == 3 * (2 + (name == "log_scale"))
    assert [each for each, p in head.named_parameters() if p.grad is not None] == [name]

"""`host_reads` finds each kind of operation that would make the host wait for a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.host_reads import host_reads

X = torch.tensor([1.0, 2.0, 3.0])
MASK, COUNTS = X > 1, torch.ones(3, dtype=torch.int64)

READS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "scalar argument": lambda: X.add(X, alpha=X[0]),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "mask": lambda: X[MASK],
    "assignment to a mask": lambda: X.clone().__setitem__(MASK, X[:2]),
    "masked_select": lambda: X.masked_select(MASK),
    "nonzero": MASK.nonzero,
    "where": lambda: torch.where(MASK),
    "unique": X.unique,
    "unique_consecutive": X.unique_consecutive,
    "bincount": COUNTS.bincount,
    "repeat_interleave": lambda: X.repeat_interleave(COUNTS),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(1)),
    "new_tensor": lambda: X.new_tensor([1.0]),
}
FREE: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: (X * 3 + X.sum()).clamp(min=X[0]),
    "positions": lambda: X[COUNTS],
    "where": lambda: torch.where(MASK, X, 0.0),
    "repeat_interleave": lambda: X.repeat_interleave(COUNTS, output_size=3),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found(name: str) -> None:
    with host_reads() as found:
        READS[name]()
    assert found
    assert all("at tests/test_host_reads.py:" in line for line in found)


@pytest.mark.parametrize("name", FREE)
def test_other_operations_are_not_reads(name: str) -> None:
    with host_reads() as found:
        FREE[name]()
    assert found == []


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * len(grad.tolist()) * float(grad.sum())


def test_reads_in_the_backward_pass_are_found() -> None:
    x = torch.ones(3, requires_grad=True)
    with host_reads() as found:
        ReadInBackward.apply(x).sum().backward()
    assert [line.partition(" ")[0] for line in found] == [
        "tolist",
        "aten._local_scalar_dense.default",
    ]


def test_reads_of_tensors_on_the_host_are_free() -> None:
    with host_reads([COUNTS]) as found:
        COUNTS.numpy().min()
        X.numpy().min()
    assert [line.partition(":")[0] for line in found] == ["numpy at tests/test_host_reads.py"]

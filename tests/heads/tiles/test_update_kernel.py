"""The kernel that updates class rows gives the bits of the torch operations."""

import pytest
import torch

from heads.optional_triton import interprets, is_installed
from heads.rows.hashing import random_bits
from heads.rows.node_values import FP8, NodeValues
from heads.rows.rounding import NUM_RANDOM_BITS
from heads.rows.update_kernel import update

pytestmark = [
    pytest.mark.skipif(not is_installed, reason="Triton is not installed"),
    pytest.mark.skipif(
        not interprets, reason="on machines with a GPU, tests/gpu compares the compiled kernel"
    ),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}
LR, DECAY, KEY, FIRST_NODE = 0.25, 0.125, (7 << 32) + 5, 3_000_000_000


def case(dtype: torch.dtype, dim: int) -> tuple[NodeValues, torch.Tensor]:
    """Rows of very different lengths, among them zeros, and gradients."""
    generator = torch.Generator().manual_seed(dim)
    values = NodeValues.zeros(9, dim, dtype, torch.device("cpu"))
    rows = torch.randn(9, dim, generator=generator)
    rows *= torch.tensor([1, 1e-6, 1e4, 0, 3e-9, 448, 1, 1, 1e-30]).unsqueeze(1)
    values.write(slice(0, 9), rows)
    grad = torch.randn(9, dim, generator=generator) * rows.abs().amax(1, keepdim=True)
    grad[6] = 0
    return values, grad


def copied(values: NodeValues) -> NodeValues:
    return NodeValues(values.held.clone(), None if values.scales is None else values.scales.clone())


def with_torch(values, nodes, grad, keeps, divisor):
    old = values.read(nodes).float()
    change = grad if divisor is None else grad / divisor
    new = old - LR * (change + DECAY * old)
    keeps = keeps if keeps.ndim == 0 else keeps.unsqueeze(1)
    ids = FIRST_NODE + torch.arange(9)[nodes]
    bits = random_bits(ids, grad.shape[1], NUM_RANDOM_BITS.get(values.held.dtype, 16), seed=KEY)
    values.write(nodes, torch.where(keeps, old, new), bits)


@pytest.mark.parametrize("dim", [1, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_kernel_gives_the_bits_of_torch(dtype, dim):
    for nodes, divisor in ((slice(0, 9), None), (torch.tensor([8, 2, 5, 0]), torch.tensor(4.0))):
        values, grad = case(dtype, dim)
        grad = grad[nodes].contiguous()
        num = len(grad)
        for keeps in (torch.tensor(False), torch.tensor(True), torch.arange(num) % 2 == 0):
            mine, want = copied(values), copied(values)
            squares = update(
                mine,
                nodes,
                grad,
                first_node=FIRST_NODE,
                keeps=keeps,
                divisor=divisor,
                lr=LR,
                weight_decay=DECAY,
                key=KEY,
            )
            with_torch(want, nodes, grad, keeps, divisor)
            torch.testing.assert_close(squares, grad.square().sum(1))
            assert torch.equal(mine.read(slice(0, 9)), want.read(slice(0, 9)))


def test_a_row_with_nan_stays_one():
    for dtype in DTYPES.values():
        values, grad = case(dtype, 5)
        grad[0, 2] = torch.nan
        options = {"first_node": 0, "keeps": torch.tensor(False), "divisor": None, "key": KEY}
        update(values, slice(0, 9), grad, lr=LR, weight_decay=0.0, **options)
        assert values.read(slice(0, 1))[0, 2].isnan()

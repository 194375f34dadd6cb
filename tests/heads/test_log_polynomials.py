"""The C extension and torch compute the same polynomials and gradients."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from heads.losses import SmoothTopK, log_polynomials
from heads.losses.symmetric import SymmetricStatistics, symmetric_statistics
from tests.heads.test_smooth_topk import generator, loss_and_gradient

ROOT = Path(__file__).parents[2]

needs_extension = pytest.mark.skipif(
    not log_polynomials._has_extension, reason="heads/losses/_polynomials.c is not built"
)


def statistics(scores: Tensor, k: int, scale: float) -> SymmetricStatistics:
    nothing = torch.full((len(scores),), -1)
    stats = symmetric_statistics(scores, nothing, k, scale)
    return SymmetricStatistics(*(stat.detach().requires_grad_() for stat in stats))


def both(stats: SymmetricStatistics, scale: float, extension: bool) -> list[Tensor]:
    """The values, and the gradient of a weighted sum of them with respect to the statistics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_polynomials, "_has_extension", extension)
        values = log_polynomials.log_polynomials(stats, scale)
        weights = torch.randn(2, len(values[0]), dtype=torch.float64, generator=generator(1))
        total = (weights[0] * values[0] + weights[1] * values[1]).sum()
        return [*values, *torch.autograd.grad(total, stats)]


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 12, 50, 100])
def test_the_extension_and_torch_give_the_same_values_and_gradients(k, num_rows, dtype):
    for num_scores in (k, 2 * k, 3 * k + 40):
        for std in (0.0, 1.0, 30.0, 1e30):
            scores = std * torch.randn(num_rows, num_scores, generator=generator(), dtype=dtype)
            scores[::3, 1:5] = -torch.inf
            for scale in (1 / k, 100 / k):
                stats = statistics(scores, k, scale)
                found, expected = (both(stats, scale, extension) for extension in (True, False))
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(
                        ours,
                        theirs,
                        rtol=1e-11 if ours.dtype == torch.float64 else 1e-6,
                        atol=1e-13,
                        equal_nan=True,  # in rows with fewer than k scores
                    )


@pytest.mark.parametrize("extension", [pytest.param(True, marks=needs_extension), False])
@pytest.mark.parametrize("name", ["leaders", "power_sums"])
def test_a_nan_in_the_statistics_gives_nan(name, extension):
    stats = statistics(torch.randn(4, 90, generator=generator()), 3, 0.5)
    with torch.no_grad():
        getattr(stats, name)[2, 0] = torch.nan
    last = both(stats, 0.5, extension)[1]
    assert last.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("extension", [pytest.param(True, marks=needs_extension), False])
def test_the_loss_of_an_empty_batch_has_an_empty_gradient(extension, monkeypatch):
    monkeypatch.setattr(log_polynomials, "_has_extension", extension)
    _, gradient = loss_and_gradient(SmoothTopK(5), torch.zeros(0, 30), torch.zeros(0).long())
    assert gradient.shape == (0, 30)


@needs_extension
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows_or_the_number_of_threads():
    scores = torch.randn(7, 100, generator=generator(), dtype=torch.float64)
    together = both(statistics(scores, 5, 0.2), 0.2, True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        again = both(statistics(scores, 5, 0.2), 0.2, True)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(together, again, strict=True):
        assert torch.equal(one, other)
    for row in range(7):
        alone = both(statistics(scores[row : row + 1], 5, 0.2), 0.2, True)[:2]
        assert [values[0] for values in alone] == [values[row] for values in together[:2]]


def test_fake_tensors_do_not_reach_the_extension():
    with FakeTensorMode():
        stats = statistics(torch.empty(6, 40), 3, 0.5)
        results = both(stats, 0.5, log_polynomials._has_extension)
    assert all(type(result) is FakeTensor for result in results)
    assert [result.shape for result in results] == [(6,), (6,), (6, 6), (6, 3)]


# Dynamo itself creates an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_torch_compile_does_not_trace_the_extension():
    stats = statistics(torch.randn(6, 40, generator=generator()), 3, 0.5)
    # A call of the extension would be an error because of `fullgraph`.
    compiled = torch.compile(log_polynomials.log_polynomials, fullgraph=True, backend="eager")
    with torch.no_grad():
        values = compiled(stats, 0.5)
    for found, expected in zip(values, both(stats, 0.5, False)[:2], strict=True):
        assert torch.equal(found, expected)


def test_without_the_extension_torch_computes_the_same_loss():
    code = (
        "import sys; sys.modules['heads.losses._polynomials'] = None\n"
        "import torch\n"
        "from heads.losses import SmoothTopK\n"
        "from heads.losses.log_polynomials import _has_extension\n"
        "from tests.heads.test_smooth_topk import generator, loss_and_gradient\n"
        "logits = torch.randn(4, 50, generator=generator())\n"
        "loss, _ = loss_and_gradient(SmoothTopK(3), logits, torch.arange(4))\n"
        "print(_has_extension, float(loss))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    extension, printed = done.stdout.split()
    assert extension == "False"
    logits = torch.randn(4, 50, generator=generator())
    loss, _ = loss_and_gradient(SmoothTopK(3), logits, torch.arange(4))
    assert float(printed) == pytest.approx(float(loss), rel=1e-6)


@needs_extension
@pytest.mark.parametrize("sizes", [(1, 5, 5), (3, 5, 5), (-2, 5, 5), (2, 4, 5), (2, 5, 4)])
def test_sizes_that_differ_from_those_of_the_arrays_are_rejected(sizes):
    arrays = np.zeros((2, 10)), np.zeros((2, 5)), np.zeros((2, 2))
    log_polynomials._polynomials.forward(*arrays, 2, 5, 5, 1.0)
    with pytest.raises(ValueError, match="the sizes of the arrays do not match B, k and p"):
        log_polynomials._polynomials.forward(*arrays, *sizes, 1.0)
    with pytest.raises(ValueError, match="do not match"):
        log_polynomials._polynomials.backward(*arrays, *arrays[:2], *sizes, 1.0)


@needs_extension
def test_arrays_that_are_not_contiguous_are_rejected():
    transposed = np.zeros((10, 2)).T
    with pytest.raises(ValueError, match="contiguous"):
        log_polynomials._polynomials.forward(
            transposed, np.zeros((2, 5)), np.zeros((2, 2)), 2, 5, 5, 1.0
        )

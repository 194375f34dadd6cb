"""The smooth top-k loss matches its definition, including in float32."""

import math

import pytest
import torch
from torch import Tensor

from heads.losses import Block, Loss, Rows, SmoothTopK, TopKHinge

EXACT = {"rtol": 1e-10, "atol": 1e-10}
TAUS = (0.001, 0.01, 0.1, 1.0, 10.0)
STDS = (0.1, 1.0, 3.0, 30.0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_and_gradient(
    loss: Loss, logits: Tensor, labels: Tensor, blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """The loss of logits [B, K], computed in blocks of classes, and its gradient [B, K]."""
    logits = logits.detach().clone().requires_grad_()
    num_classes = logits.shape[1]
    parts, trues = [], []
    for ids in torch.arange(num_classes).chunk(blocks):
        part = logits[:, ids[0] : ids[-1] + 1]
        block = Block.of(ids, labels, labels - ids[0], part)
        parts.append(loss.statistics(part, block))
        trues.append(block.true)
    value = loss.value(loss.merge(parts), Rows(num_classes, labels))
    gradient, *by_true = torch.autograd.grad(value, [logits, *trues])
    # z_y is a sum over blocks, so its gradient is the same in every block.
    return value.detach(), gradient.scatter_add(1, labels[:, None], by_true[0][:, None])


def enumerated(k: int, tau: float, alpha: float, logits: Tensor, labels: Tensor):
    """Eq. 9 of paper 003 over all k-tuples, and its gradient."""
    logits = logits.detach().clone().requires_grad_()
    tuples = torch.combinations(torch.arange(logits.shape[1]), k)
    means = logits[:, tuples].sum(2) / k
    has_y = (tuples == labels[:, None, None]).any(2)
    every = torch.logsumexp((means + alpha * (~has_y).double()) / tau, 1)
    right = torch.logsumexp(means.where(has_y, -torch.inf) / tau, 1)
    value = (tau * every - tau * right).mean()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def by_recursion(logits: Tensor, labels: Tensor, k: int, tau: Tensor, alpha: float):
    """Eq. 10 of paper 003 for each row [B] with its own tau [B], and its gradient [B, K].

    A recursion over the classes, in log space and float64.
    """
    logits = logits.detach().double().requires_grad_()
    scaled = logits / (k * tau[:, None])
    false = scaled.scatter(1, labels[:, None], -math.inf)
    # Do not use -inf, for which the gradient of logaddexp is NaN.
    log_sigma = torch.full((len(logits), k + 1), -1e300, dtype=torch.float64)
    log_sigma[:, 0] = 0
    for log_term in false.unbind(1):
        longer = torch.logaddexp(log_sigma[:, 1:], log_sigma[:, :-1] + log_term[:, None])
        log_sigma = torch.cat([log_sigma[:, :1], longer], 1)
    true = scaled.gather(1, labels[:, None]).squeeze(1)
    without, rest = log_sigma[:, k] + alpha / tau, log_sigma[:, k - 1] + true
    values = tau * (torch.logaddexp(without, rest) - rest)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(("k", "num_classes"), [(1, 2), (1, 9), (2, 14), (5, 6), (5, 12)])
def test_loss_and_gradient_equal_the_sum_over_all_tuples(k, num_classes, blocks):
    labels = torch.randint(num_classes, (4,), generator=generator())
    for tau in (0.01, 0.3, 10.0):
        for std in (0.1, 10.0):
            logits = torch.randn(4, num_classes, generator=generator(1), dtype=torch.float64) * std
            expected = enumerated(k, tau, 0.7, logits, labels)
            got = loss_and_gradient(SmoothTopK(k, tau, 0.7), logits, labels, blocks)
            torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("blocks", [1, 6])
def test_float32_is_accurate_for_every_temperature_and_scale_of_the_logits(blocks):
    shape = (len(TAUS), len(STDS), 16, 500)
    logits = torch.randn(shape, generator=generator()) * torch.tensor(STDS)[:, None, None]
    # In half of the rows, the label competes with the k-th largest score.
    labels = torch.randint(500, shape[:-1], generator=generator(1))
    labels[..., :8] = logits[..., :8, :].topk(8).indices.diagonal(dim1=-2, dim2=-1)
    tau_of_row = torch.tensor(TAUS, dtype=torch.float64)[:, None, None].expand(shape[:-1])
    values, gradients = by_recursion(
        logits.flatten(0, 2), labels.flatten(), 5, tau_of_row.flatten(), 1.0
    )
    values, gradients = values.view(shape[:-1]), gradients.view(shape)
    for i, tau in enumerate(TAUS):
        for j in range(len(STDS)):
            value, gradient = loss_and_gradient(
                SmoothTopK(5, tau, 1.0), logits[i, j], labels[i, j], blocks
            )
            assert value.dtype == gradient.dtype == torch.float32
            assert abs(float(value) / float(values[i, j].mean()) - 1) < 1e-6
            error = (16 * gradient.double() - gradients[i, j]).norm(dim=1)
            assert (error <= 2e-6 * gradients[i, j].norm(dim=1).clamp(min=1e-6)).all()


@pytest.mark.parametrize(("k", "num_classes"), [(12, 40), (100, 130), (100, 900)])
@pytest.mark.parametrize("std", [0.0, 30.0])
def test_float32_is_accurate_for_large_k(k, num_classes, std):
    logits = torch.randn(6, num_classes, generator=generator()) * std
    labels = torch.randint(num_classes, (6,), generator=generator(1))
    for tau in (0.01, 1.0):
        taus = torch.full((6,), tau, dtype=torch.float64)
        values, gradients = by_recursion(logits, labels, k, taus, 1.0)
        for blocks in (1, 3):
            value, gradient = loss_and_gradient(SmoothTopK(k, tau, 1.0), logits, labels, blocks)
            assert abs(float(value) / float(values.mean()) - 1) < 1e-5
            error = (6 * gradient.double() - gradients).norm(dim=1)
            assert (error <= 1e-5 * gradients.norm(dim=1).clamp(min=1e-6)).all()


@pytest.mark.parametrize("tau", [0.001, 1.0])
@pytest.mark.parametrize(("k", "num_false"), [(5, 100), (100, 200_000)])
def test_tied_scores_share_the_gradient(tau, k, num_false):
    # sigma_100 of 200,000 terms exceeds the range of float64.
    logits, labels = torch.full((2, num_false + 1), 7.0), torch.tensor([0, 60])
    value, gradient = loss_and_gradient(SmoothTopK(k, tau, 1.0), logits, labels, 3)
    # The log of sigma_k / sigma_(k-1) for equal terms. log(e^x + 1) is computed so that e^x does
    # not overflow.
    excess = 1 / tau + math.log((num_false - k + 1) / k)
    assert float(value) == pytest.approx(tau * (excess + math.log1p(math.exp(-excess))), rel=1e-5)
    share = 1 / (1 + math.exp(-excess)) / k / 2
    expected = torch.full_like(gradient, share / num_false)
    expected[[0, 1], labels] = -share
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=0)


def test_impossible_classes_have_a_zero_gradient_in_any_block():
    logits = torch.randn(4, 30, generator=generator(), dtype=torch.float64)
    labels = torch.tensor([0, 5, 9, 2])
    expected = loss_and_gradient(SmoothTopK(3), logits[:, :10], labels)
    logits[:, 10:] = -torch.inf
    for blocks in (1, 3, 15):
        value, gradient = loss_and_gradient(SmoothTopK(3), logits, labels, blocks)
        torch.testing.assert_close((value, gradient[:, :10]), expected, **EXACT)
        assert (gradient[:, 10:] == 0).all()


def test_the_loss_is_zero_with_fewer_than_k_possible_false_classes():
    logits = torch.full((3, 12), -torch.inf)
    labels = torch.tensor([0, 6, 11])
    for num_false in (0, 1, 2):
        logits[:, 1 : 1 + num_false] = 5.0
        logits[torch.arange(3), labels] = 1.0
        for blocks in (1, 4):
            value, gradient = loss_and_gradient(SmoothTopK(3), logits, labels, blocks)
            assert value == 0
            assert (gradient == 0).all()


def test_a_nan_logit_gives_a_nan_loss():
    labels = torch.tensor([3])
    for columns in ([3], [4], [60], [*range(4, 80)]):
        logits = torch.randn(1, 80, generator=generator())
        logits[0, columns] = torch.nan
        for blocks in (1, 5):
            assert loss_and_gradient(SmoothTopK(3), logits, labels, blocks)[0].isnan()


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("k", [1, 5])
def test_huge_logits_have_the_loss_and_the_gradient_of_the_hinge(k, blocks):
    logits = torch.randn(8, 60, generator=generator()) * 1e30
    logits[:, ::7] = -torch.inf
    logits[4:, 1:9] = 1e30  # ties
    labels = torch.arange(1, 7).repeat(2)[:8]
    smooth = loss_and_gradient(SmoothTopK(k, 0.1), logits, labels, blocks)
    value, gradient = loss_and_gradient(TopKHinge(k), logits, labels, blocks)
    torch.testing.assert_close(smooth[0], value)
    # With ties, the hinge has one of several subgradients.
    torch.testing.assert_close(smooth[1][:4], gradient[:4])
    assert smooth[1].isfinite().all()
    torch.testing.assert_close(smooth[1].sum(1), torch.zeros(8), atol=1e-6, rtol=0)

"""The logarithms of sigma_(k-1) and sigma_k, computed from the statistics of `symmetric.py`, whose
docstring describes the method.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.losses.symmetric import SymmetricStatistics, finite

# Shape legend: B rows, k the highest degree, m = 2k leaders, p power sums, n coefficients.


def log_polynomials(statistics: SymmetricStatistics, scale: float) -> tuple[Tensor, Tensor]:
    """Return log sigma_(k-1) and log sigma_k [B], in float64, minus the logs of their largest
    products, scale (z_1 + .. + z_(k-1)) and scale (z_1 + .. + z_k).

    The difference preserves digits that would be lost in log sigma_k, which may be as large as 1e5.
    Its gradient is that of log sigma: the largest product is treated as a constant. The values are
    arbitrary and their gradients 0 in rows with fewer than k scores above -inf.
    """
    last, previous = _LogPolynomials.apply(*statistics, scale)
    return previous, last


# Coefficients are the first dimension of these tensors, [.., B], so that operations on a slice of
# the coefficients use contiguous memory even for a small k.


class _LogPolynomials(torch.autograd.Function):
    """Leaders [B, m], power sums [B, p] -> log sigma_k, log sigma_(k-1), as in `log_polynomials`.

    All terms are in a unit U that is at least the k-th largest term. The factor of a leader e is
    divided by max(1, e / U), so it is a + b t with a = min(1, U / e) and b = min(1, e / U).
    """

    @staticmethod
    def forward(
        ctx: Any, leaders_Bm: Tensor, sums_Bp: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        k = leaders_Bm.shape[1] // 2
        leaders, sums = _coefficients_first(leaders_Bm), _coefficients_first(sums_Bp)
        logs = (leaders - finite(leaders[k - 1])).mul_(scale)
        # U is the k-th largest term, or a k-th of the sum of the other scores' terms if that is
        # larger. In this unit, the coefficients of their product are at most 1, k, k^2 / 2, ...
        mean = (sums[0] / k).clamp_(min=1)
        log_mean = logs[-1] + mean.log()
        log_unit = log_mean.clamp(min=0)
        logs -= log_unit
        ratio = (log_mean - log_unit).exp_().div_(mean)  # e_m / U
        units = ratio.neg_().expand_as(sums).cumprod(0).neg_()  # (-1)^(r-1) (e_m / U)^r
        others = _newton(sums * units, k)
        levels = _multiply_leaders(logs)
        top, after = levels[-1][: k + 1].unflatten(1, (2, -1)).unbind(1)
        below = _product(after, others)[: k + 1].flip(0)
        both = torch.stack([(top * below).sum(0), (top[:-1] * below[1:]).sum(0)])
        ctx.save_for_backward(leaders_Bm, sums_Bp, units, others, below, both, *levels)
        ctx.scale = scale
        divided = logs[:k].clamp_(max=0)  # the logs of b for the k largest terms
        last, previous = (both.log() - divided[:-1].sum(0)).unbind()
        return last - divided[-1], previous

    @staticmethod
    def backward(ctx: Any, grad_last: Tensor, grad_previous: Tensor) -> tuple[Tensor, Tensor, None]:
        leaders_Bm, sums_Bp, units, others, below, both, *levels = ctx.saved_tensors
        grads = torch.stack([grad_last, grad_previous])
        by_last, by_previous = (grads / both).where(both != 0, 0).unbind()
        n = len(others)
        products = levels[-1].unflatten(1, (2, len(leaders_Bm)))
        top, after = products[:n].unbind(1)
        by_products = torch.zeros_like(products)
        torch.mul(below, by_last, out=by_products[:n, 0])
        by_products[: n - 1, 0].addcmul_(below[1:], by_previous)
        top = pad(top.flip(0), (0, 0, 0, n))
        by_below = (top[:-1] * by_last).addcmul_(top[1:], by_previous)
        by_after, by_others = _product_backward(by_below, torch.stack([after, others], 1)).unbind(1)
        by_products[:n, 1] = by_after
        by_leaders = _multiply_leaders_backward(by_products.flatten(1), levels, n - 1) * ctx.scale
        by_sums = _newton_backward(by_others, others, len(units)).mul_(units)
        return by_leaders.T.to(leaders_Bm.dtype), by_sums.T.to(sums_Bp.dtype), None


def _coefficients_first(values_Bn: Tensor) -> Tensor:
    """Return the float64 transpose [n, B], contiguous."""
    return values_Bn.T.to(torch.float64, memory_format=torch.contiguous_format)


def _multiply_leaders(logs_mB: Tensor) -> list[Tensor]:
    """Multiply the factors of the k largest leaders, and those of the next k.

    Returns all levels of the computation [degree + 1, products x 2 x B]: the factors a + b t, the
    products of two factors, of four, .. A level's products are those of its predecessor's first
    half with the second half. Factors 1 are added until their number is a power of two.
    """
    k, num_rows = len(logs_mB) // 2, logs_mB.shape[1]
    padded = logs_mB.new_full((1 << (k - 1).bit_length(), 2, num_rows), -torch.inf)
    padded[:k] = logs_mB.unflatten(0, (2, k)).transpose(0, 1)
    logs = padded.flatten()
    levels = [torch.stack([-logs, logs]).clamp_(max=0).exp_()]
    for _ in range((k - 1).bit_length()):
        levels.append(_product(*levels[-1].chunk(2, dim=1)))
    return levels


def _multiply_leaders_backward(grad: Tensor, levels: list[Tensor], k: int) -> Tensor:
    """Convert the gradient of the last level to that of log e of each leader [m, B]."""
    num_rows = levels[-1].shape[1] // 2
    for level in reversed(levels[:-1]):
        grad = _product_backward(grad, level.unflatten(1, (2, -1))).flatten(1)
    by_leaders = (grad[1] * levels[0][1])[: 2 * k * num_rows].unflatten(0, (k, 2, num_rows))
    return by_leaders.transpose(0, 1).flatten(0, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply polynomials, whose coefficients are the first dimension."""
    product = left.new_zeros(len(left) + len(right) - 1, left.shape[1])
    for window, coefficient in zip(
        _windows(product, len(right)).unbind(), left.unbind(), strict=True
    ):
        window.addcmul_(coefficient, right)
    return product


def _product_backward(grad: Tensor, factors: Tensor) -> Tensor:
    """Convert the gradient of `_product` to that of its two factors [n, 2, ..]."""
    by_factors = torch.zeros_like(factors)
    windows = _windows(grad.unsqueeze(1), len(factors))
    for window, swapped in zip(windows.unbind(), factors.flip(1).unbind(), strict=True):
        by_factors.addcmul_(window, swapped)
    return by_factors


def _newton(signed_pB: Tensor, k: int) -> Tensor:
    """Newton's identities: i sigma_i = sum over r of (-1)^(r-1) sigma_(i-r) p_r [k + 1, B]."""
    sigma = signed_pB.new_zeros(k + 1 + len(signed_pB), signed_pB.shape[1])
    sigma[0] = 1
    coefficients = sigma.unbind()
    for i, next_ones in enumerate(_windows(sigma[1:], len(signed_pB)).unbind()):
        if i > 1:
            coefficients[i].div_(i)
        next_ones.addcmul_(signed_pB, coefficients[i])
    return sigma[: k + 1]


def _newton_backward(grad_nB: Tensor, sigma_nB: Tensor, num_powers: int) -> Tensor:
    """Convert the gradient of sigma to that of the signed power sums [p, B]: the derivative of
    sigma_i with respect to p_r is sigma_(i-r) / r."""
    sums = grad_nB.new_zeros(num_powers, grad_nB.shape[1])
    lower = pad(sigma_nB.flip(0), (0, 0, 0, num_powers - 1))  # sigma_k, .., sigma_0, 0, ..
    for grad, window in zip(
        grad_nB[1:].flip(0).unbind(), _windows(lower[1:], num_powers).unbind(), strict=True
    ):
        sums.addcmul_(window, grad)
    degrees = torch.arange(1, num_powers + 1, device=sums.device)
    return sums.div_(degrees[:, None])


def _windows(coefficients: Tensor, size: int) -> Tensor:
    """Return a view of `size` adjacent coefficients from each position [positions, size, ..]."""
    # The same as `unfold` and `movedim`, but one call. With few rows, calls take most of the time.
    positions, first = len(coefficients) - size + 1, coefficients.stride(0)
    return coefficients.as_strided(
        (positions, size, *coefficients.shape[1:]), (first, *coefficients.stride())
    )

"""Elementary symmetric polynomials sigma_0..sigma_k of e_j = exp(scale z_j) over each row's scores.

For example, sigma_2 of e_1, e_2, e_3 is e_1 e_2 + e_1 e_3 + e_2 e_3, the sum over all pairs.

The 2k largest scores of a row, its leaders, determine the numerical accuracy. They are multiplied
in one by one, each as a ratio to a term that is at least as large. All other scores are scaled by
the smallest leader, reduced to power sums, and converted to symmetric polynomials with Newton's
identities. The alternating sums in these identities cause cancellation, but the leaders bound it.
No step overflows at any scale. Tensors of size [B, k] are float64.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from heads.losses.base import logsumexp

# Shape legend: B rows, C scores of a row, k the highest degree, n = k + 1, m leaders, P parts.

_CHUNK = 1 << 19  # scores processed at a time on a CPU, so that they stay in its cache
_PARALLEL_SIZE = 1 << 15  # minimum number of scores for multi-threaded torch.topk on a CPU
_CANDIDATES = 128  # number of scores for which torch.topk is fast on a CPU


class SymmetricPolynomials(NamedTuple):
    """sigma_i, represented as the product of the i largest terms times a ratio of at least 1.

    `largest` [B, k] are the k largest scores, descending and padded with -inf, without a gradient.
    `log_ratios` [B, k + 1] are log(sigma_i / exp(scale (z_1 + .. + z_i))), -inf if sigma_i is zero.
    Their gradient is that of log sigma_i; the largest scores are treated as constants. This
    representation preserves digits that would be lost in log sigma_i, which may be as large as 1e5.
    """

    largest: Tensor
    log_ratios: Tensor


def symmetric_polynomials(
    scores_BC: Tensor, left_out_B: Tensor, k: int, scale: float
) -> SymmetricPolynomials:
    """Return the polynomials of each row without the column `left_out` (-1: use all columns).

    Scores of -inf have no effect.
    """
    return SymmetricPolynomials(*_Polynomials.apply(scores_BC, left_out_B, k, scale))


def no_scores(like_B: Tensor, k: int) -> SymmetricPolynomials:
    """Return the polynomials of rows without scores: sigma_0 = 1, all others 0."""
    nothing = like_B.new_full((len(like_B), k), -torch.inf)
    return SymmetricPolynomials(nothing, pad(nothing, (1, 0)))


def merge_polynomials(parts: Sequence[SymmetricPolynomials], scale: float) -> SymmetricPolynomials:
    """Return the polynomials of the union of disjoint sets of scores: products, in log space."""
    largest = torch.stack([part.largest.detach() for part in parts])
    ratios = torch.stack([part.log_ratios for part in parts])
    while len(ratios) > 1:
        even = len(ratios) // 2 * 2
        merged, product = _products(largest[:even], ratios[:even].double(), scale)
        largest = torch.cat([merged, largest[even:]])
        ratios = torch.cat([product.to(ratios.dtype), ratios[even:]])
    return SymmetricPolynomials(largest[0], ratios[0])


def _products(largest_PBk: Tensor, ratios_PBn: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Multiply neighboring parts: sigma_i is the sum over j of sigma_j times sigma_(i-j)."""
    left, right = largest_PBk[0::2], largest_PBk[1::2]
    merged = torch.cat([left, right], dim=-1).topk(left.shape[-1], dim=-1).values
    products = _prefix_sums(left.double())[..., None] + _shifted(_prefix_sums(right.double()))
    top = _prefix_sums(merged.double())[..., None, :]
    relative = (products - top.where(top != -torch.inf, 0)) * scale
    terms = relative + ratios_PBn[0::2, ..., None] + _shifted(ratios_PBn[1::2])
    return merged, logsumexp(terms.flatten(0, 1)).unflatten(0, terms.shape[:2])


def _prefix_sums(values: Tensor) -> Tensor:
    """[..., k] -> the sums of the first 0 to k values [..., n]."""
    return pad(values.cumsum(-1), (1, 0))


def _shifted(coefficients: Tensor, nothing: float = -math.inf) -> Tensor:
    """[..., n] -> [..., j, i], the coefficient i - j, or `nothing` if i < j."""
    n = coefficients.shape[-1]
    return pad(coefficients, (n - 1, 0), value=nothing).unfold(-1, n, 1).flip(-2)


def _diagonal_sums(upper_Bnn: Tensor) -> Tensor:
    """[B, j, i] -> the sums over the diagonals i - j = 0 to k [B, n]; entries with i < j must be
    zero."""
    n = upper_Bnn.shape[-1]
    # Rows of length 2n, viewed as rows of length 2n + 1, are shifted by one more element each.
    flat = pad(upper_Bnn, (0, n)).flatten(1)
    return pad(flat, (0, n)).unflatten(1, (n, 2 * n + 1))[..., :n].sum(1)


class _Polynomials(torch.autograd.Function):
    """Scores [B, C] -> largest [B, k], log ratios [B, k + 1].

    Backward needs only the scores: the gradient of all but a few columns is a polynomial in the
    terms.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BC: Tensor, left_out_B: Tensor, k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        leaders, columns = _leaders(scores_BC, left_out_B, min(2 * k, scores_BC.shape[1]))
        left_out = left_out_B[:, None].where(left_out_B[:, None] >= 0, columns[:, :1])
        dropped = torch.cat([columns, left_out], dim=1)
        terms = _Terms(leaders[:, -1:], dropped, scale)
        powers, computed = _power_sums(scores_BC, terms, k)
        largest = pad(leaders[:, :k], (0, max(0, k - leaders.shape[1])), value=-torch.inf)
        log_ratios, tiny = _multiply(leaders.double(), largest.double(), powers.double(), scale)
        ctx.save_for_backward(scores_BC, computed, leaders, dropped, *tiny)
        ctx.mark_non_differentiable(largest)
        ctx.scale = scale
        return largest, log_ratios.to(scores_BC.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad_log_ratios: Tensor) -> tuple[Tensor | None, ...]:
        scores_BC, computed, leaders, dropped, *tiny = ctx.saved_tensors
        by_leaders, coefficients = _derivatives(grad_log_ratios.double() * ctx.scale, *tiny)
        terms = _Terms(leaders[:, -1:], dropped, ctx.scale)
        grad = _evaluate(scores_BC, computed, terms, coefficients.to(scores_BC.dtype))
        grad.scatter_(1, dropped[:, :-1], by_leaders.to(grad.dtype))
        return grad, None, None, None


def _leaders(scores_BC: Tensor, left_out_B: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest scores of each row, descending, and their columns; the score of the
    column `left_out` is treated as -inf."""
    columns = _largest_columns(scores_BC, min(num + 1, scores_BC.shape[1]))
    values = scores_BC.gather(1, columns)
    values.masked_fill_(columns == left_out_B[:, None], -torch.inf)
    values, positions = values.topk(num, dim=1)
    return values, columns.gather(1, positions)


def _largest_columns(scores_BC: Tensor, num: int) -> Tensor:
    """Return the columns [B, num] of the largest scores, in any order.

    They are in the `num` groups of columns with the largest maxima, which are found recursively.
    On a CPU, torch.topk over entire rows takes several times as long.
    """
    num_columns = scores_BC.shape[1]
    size = max(2, _CANDIDATES // num)
    if num_columns <= size * num or scores_BC.device.type != "cpu":
        return _topk_columns(scores_BC, num)
    # The columns of a group are `groups` apart, so the maxima are computed along contiguous memory.
    groups = num_columns // size
    grouped = scores_BC[:, : size * groups].unflatten(1, (size, groups))
    best = _largest_columns(grouped.amax(1), num)
    offsets = torch.arange(0, size * groups, groups)
    rest = torch.arange(size * groups, num_columns).expand(len(best), -1)
    candidates = torch.cat([(best[:, :, None] + offsets).flatten(1), rest], dim=1)
    positions = _topk_columns(scores_BC.gather(1, candidates), num)
    return candidates.gather(1, positions)


def _topk_columns(scores_BC: Tensor, num: int) -> Tensor:
    """Return the columns that torch.topk selects.

    On a CPU, torch.topk uses several threads only above `_PARALLEL_SIZE` scores, so a slightly
    smaller batch is padded to that size.
    """
    num_rows, num_columns = scores_BC.shape
    least = _PARALLEL_SIZE // max(1, num_rows) + 1
    if scores_BC.device.type == "cpu" and least // 2 < num_columns < least:
        padded = pad(scores_BC, (0, least - num_columns), value=-torch.inf)
        columns = padded.topk(num, dim=1, sorted=False).indices
        # If there are scores of -inf, topk may have selected padding.
        if not (columns >= num_columns).any():
            return columns
    return scores_BC.topk(num, dim=1, sorted=False).indices


def _power_sums(scores_BC: Tensor, terms: "_Terms", k: int) -> tuple[Tensor, Tensor | None]:
    """Return the sums [B, k] of the first k powers of the terms, and the terms if they fit in a
    single chunk."""
    eps = torch.finfo(scores_BC.dtype).eps
    sums = scores_BC.new_empty(len(scores_BC), k)
    power = terms.buffer(scores_BC)
    for rows, part in terms.chunks(scores_BC):
        sums[rows, 0] = part.sum(1)
        raised = power[: len(part)]
        for degree in range(2, k + 1):
            torch.mul(part if degree == 2 else raised, part, out=raised)
            # Powers below eps are negligible relative to the leaders. Set them to zero, because
            # arithmetic with denormal numbers is slow.
            if degree % 4 == 2:
                threshold(raised, eps ** min(degree, 4), 0, inplace=True)
            sums[rows, degree - 1] = raised.sum(1)
    return sums, part if 0 < scores_BC.numel() <= _CHUNK else None


def _evaluate(
    scores_BC: Tensor, computed: Tensor | None, terms: "_Terms", coefficients_Bk: Tensor
) -> Tensor:
    """Return the sum over r of coefficients[:, r - 1] terms^r [B, C], by Horner's rule.

    `computed` are the terms if forward saved them.
    """
    values = torch.empty_like(scores_BC, memory_format=torch.contiguous_format)
    chunks = terms.chunks(scores_BC) if computed is None else [(slice(None), computed)]
    for rows, part in chunks:
        *lower, highest = coefficients_Bk[rows].split(1, dim=1)
        value = torch.mul(part, highest, out=values[rows])
        for coefficient in reversed(lower):
            value.add_(coefficient).mul_(part)
    return values


class _Terms(NamedTuple):
    """exp(scale (z - reference)) of scores z [B, C], zero in the columns `dropped` of each row.

    The terms are computed chunk by chunk, in forward and again in backward, unless there is a
    single chunk. On a CPU this is faster than storing and reading them.
    """

    reference_B1: Tensor
    dropped: Tensor
    scale: float

    def chunks(self, scores_BC: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows and their terms, which are valid until the next iteration."""
        # Smaller terms are negligible, and their squares would be denormal numbers, which are slow.
        floor = math.log2(torch.finfo(scores_BC.dtype).tiny) / 2
        reference = self.reference_B1.where(self.reference_B1 != -torch.inf, 0)
        buffer = self.buffer(scores_BC)
        for start in range(0, len(scores_BC), max(1, len(buffer))):
            rows = slice(start, start + len(buffer))
            scores = scores_BC[rows]
            part = torch.sub(scores, reference[rows], out=buffer[: len(scores)])
            # exp2 is several times faster than exp on a CPU.
            part.mul_(self.scale * math.log2(math.e))
            threshold(part, floor, -torch.inf, inplace=True).exp2_()
            yield rows, part.scatter_(1, self.dropped[rows], 0)

    @staticmethod
    def buffer(scores_BC: Tensor) -> Tensor:
        """Allocate memory for a chunk: as many rows as fit in the cache on a CPU, all rows on other
        devices."""
        num_rows, num_columns = scores_BC.shape
        on_cpu = scores_BC.device.type == "cpu"
        chunk = min(num_rows, max(1, _CHUNK // num_columns)) if on_cpu else num_rows
        return scores_BC.new_empty(chunk, num_columns)


def _multiply(
    leaders_Bm: Tensor, largest_Bk: Tensor, powers_Bk: Tensor, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Combine the leaders and the other scores: return log(sigma_i / product of the i largest
    terms) [B, n], and the tensors that `_derivatives` needs."""
    smallest = leaders_Bm[:, -1:]
    # If the sum of the others exceeds the smallest leader, use this sum as the unit, so that no
    # power overflows.
    total = powers_Bk[:, :1].clamp(min=1)
    units = total.expand_as(powers_Bk).cumprod(1)
    others = _newton(powers_Bk / units)
    factors, products = _multiply_leaders(leaders_Bm, largest_Bk, scale)
    # sigma_i is the sum over j of the leaders' sigma_j times the others' sigma_(i-j). The others
    # are in units of `total` (times the smallest leader), and the result is in units of the largest
    # terms j + 1 to i; `weights` converts between them. A row with fewer scores has no others, so
    # its weight only needs to be finite.
    exists = (largest_Bk != -torch.inf) & (smallest != -torch.inf)
    above = _prefix_sums(((largest_Bk - smallest) * scale).where(exists, 0) - total.log())
    weights = (above[:, :, None] - above[:, None, :]).triu_()
    most = weights.amax(1)
    weights = weights.sub_(most[:, None, :]).exp_().triu_()
    sums = (products[-1][:, None, :] @ (weights * _shifted(others, 0))).squeeze(1)
    return sums.log() + most, (units, others, factors, products, weights, sums)


def _derivatives(
    grad_Bn: Tensor,
    units: Tensor,
    others: Tensor,
    factors: Tensor,
    products: Tensor,
    weights: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convert the gradient of the log ratios to two gradients.

    Returns the gradient with respect to log e of the leaders [B, m], and the coefficients [B, k] of
    the polynomial in e_j that is the gradient with respect to log e_j of the other scores.
    """
    grad = (grad_Bn / sums).where(sums != 0, 0)
    shifted = _shifted(others, 0)
    by_products = ((weights * shifted) @ grad[..., None]).squeeze(-1)
    by_others = _diagonal_sums(weights * products[-1][..., None] * grad[:, None, :])
    # d sigma_i / d p_r = (-1)^(r-1) sigma_(i-r) / r, and d p_r / d log e = r e^r.
    coefficients = (shifted[:, 1:] @ by_others[..., None]).squeeze(-1) / units
    coefficients[:, 1::2] *= -1
    return _leaders_derivatives(by_products, factors, products), coefficients


def _multiply_leaders(
    leaders_Bm: Tensor, largest_Bk: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the ratios e_l / e_i of the leaders' terms [m, B, k], and sigma_i of the first 0 to m
    leaders divided by the product of the i largest terms [m + 1, B, n]."""
    largest = largest_Bk.where(largest_Bk != -torch.inf, 0)
    # The ratio to a smaller leader would exceed 1; it is multiplied by zero, so clamp it.
    factors = (leaders_Bm.T[:, :, None] - largest).mul_(scale).clamp_(max=0).exp_()
    products = factors.new_zeros(len(factors) + 1, *largest.shape[:1], largest.shape[1] + 1)
    products[:, :, 0] = 1
    lower, upper = products[:, :, :-1].unbind(), products[:, :, 1:].unbind()
    for leader, factor in enumerate(factors.unbind()):
        torch.addcmul(upper[leader], factor, lower[leader], out=upper[leader + 1])
    return factors, products


def _leaders_derivatives(grad_Bn: Tensor, factors: Tensor, products: Tensor) -> Tensor:
    """Backpropagate the gradient of the last products to log e of each leader [B, m]."""
    grads = grad_Bn.expand_as(products).contiguous()
    lower, upper, factor = grads[:, :, :-1].unbind(), grads[:, :, 1:].unbind(), factors.unbind()
    for leader in reversed(range(len(factors))):
        after = leader + 1
        torch.addcmul(lower[after], factor[leader], upper[after], out=lower[leader])
    return (grads[1:, :, 1:] * factors * products[:-1, :, :-1]).sum(-1).T


def _newton(powers_Bk: Tensor) -> Tensor:
    """Newton's identities: i sigma_i = sum over r of (-1)^(r-1) sigma_(i-r) p_r [B, n]."""
    signed = powers_Bk.clone()
    signed[:, 1::2] *= -1
    # Store sigma in descending order of degree, so that sigma_(i-1), sigma_(i-2), ... are aligned
    # with p_1, p_2, ...
    k = powers_Bk.shape[1]
    sigma = torch.ones(len(powers_Bk), k + 1, dtype=powers_Bk.dtype, device=powers_Bk.device)
    for i in range(1, k + 1):
        sigma[:, k - i] = (sigma[:, k - i + 1 :] * signed[:, :i]).sum(1).div_(i)
    return sigma.flip(1)

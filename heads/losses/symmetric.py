"""Statistics of each row's scores z_j that determine the elementary symmetric polynomials
sigma_(k-1) and sigma_k of e_j = exp(scale z_j).

For example, sigma_2 of e_1, e_2, e_3 is e_1 e_2 + e_1 e_3 + e_2 e_3, the sum over all pairs.

sigma_i is the coefficient of t^i in the product of all factors 1 + e_j t. The module does not
multiply the factors of all scores. It reduces a row to two statistics:

- the 2k largest scores, called leaders;
- the power sums p_r of all other terms, in units of the smallest leader e_m: the sum of
  (e_j / e_m)^r over the other scores j.

Statistics of disjoint sets of scores can be merged. `log_polynomials.py` computes the polynomials
from the merged statistics, which are a few numbers per row. Newton's identities convert the power
sums to the coefficients of the product of the other factors. This product is multiplied by the
factors of the leaders.

For example, let k = 1, and let the terms be 4, 2, 1, 1. The leaders are 4 and 2. In units of 2, the
other terms are 0.5 and 0.5, and p_1 = 1. With t in units of 1/2, the product of the other factors
is 1 + t + .., and the leaders' factors are 1 + 2 t and 1 + t. The coefficient of t in the product
of all factors is 1 + 2 + 1 = 4. In units of 2, this is sigma_1 = 8.

Newton's identities alternate in sign, which causes cancellation if the terms are large. The leaders
limit it, because sigma_i / sigma_(i-1) increases with every term, and with 2k terms equal to e_m it
is e_m (2k - i + 1) / i. Therefore

    sigma_(k-r) e_m^r / sigma_k  <=  k / (k + 1) * (k - 1) / (k + 2) * .. (r fractions).

The left side is the factor by which p_r affects sigma_k. It decreases quickly: with k = 50, powers
above 33 change log sigma_k by less than the rounding error of float32, so they are omitted. All
other steps add and multiply nonnegative numbers in float64. No step overflows at any scale.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

# Shape legend: B rows, C scores of a row, k the highest degree, m = 2k leaders, p power sums.


class SymmetricStatistics(NamedTuple):
    """The statistics of a set of scores that determine its polynomials; see the module docstring.

    `leaders` [B, 2k] are the largest scores, descending and padded with -inf. `power_sums` [B, p]
    are the sums of the first p powers of the other terms in units of the last leader, 0 if there
    are no other scores. In gradients, this unit is a constant.
    """

    leaders: Tensor
    power_sums: Tensor


def symmetric_statistics(
    scores_BC: Tensor, left_out_B: Tensor, k: int, scale: float
) -> SymmetricStatistics:
    """Return the statistics of each row without the column `left_out` (-1: use all columns).

    Scores of -inf have no effect.
    """
    return SymmetricStatistics(*_Statistics.apply(scores_BC, left_out_B, k, scale))


def no_scores(like_B: Tensor, k: int) -> SymmetricStatistics:
    """Return the statistics of rows without scores."""
    num_rows = len(like_B)
    leaders = like_B.new_full((num_rows, 2 * k), -torch.inf)
    return SymmetricStatistics(leaders, like_B.new_zeros(num_rows, _num_powers(k, like_B.dtype)))


def merge_statistics(parts: Sequence[SymmetricStatistics], scale: float) -> SymmetricStatistics:
    """Return the statistics of the union of disjoint sets of scores.

    The leaders are selected from those of all parts. The terms of the others are added to the power
    sums, which are converted to units of the new smallest leader.
    """
    if len(parts) == 1:
        return parts[0]
    leaders = torch.cat([part.leaders for part in parts], dim=1)
    no_column = torch.full_like(leaders[:, 0], -1, dtype=torch.long)
    merged = symmetric_statistics(leaders, no_column, parts[0].leaders.shape[1] // 2, scale)
    units = torch.stack([part.leaders[:, -1].detach() for part in parts])
    unit = finite(merged.leaders[:, -1].detach())
    degrees = _degrees(merged.power_sums.shape[1], unit)
    factors = ((units - unit)[:, :, None] * (scale * degrees)).exp()
    sums = torch.stack([part.power_sums for part in parts])
    return SymmetricStatistics(merged.leaders, merged.power_sums + (factors * sums).sum(0))


def _num_powers(k: int, dtype: torch.dtype) -> int:
    """Return the number p of power sums; higher powers change log sigma_k by less than rounding.

    The effect of p_r on log sigma_k is about p_r e_m^r sigma_(k-r) / (r sigma_k). With P = p_1,
    p_r is at most P, and sigma_i / sigma_(i-1) is at least e_m (2k + P - i + 1) / i, because this
    ratio is an increasing and concave function of the terms (Marcus and Lopes 1957). It follows
    that the effect is at most k * (k - 1) / (k + 2) * .. * (k - r + 1) / (k + r) for any P.
    """
    effect, power = float(k), 1
    while power < k and effect > torch.finfo(dtype).eps / 8:
        effect *= (k - power) / (k + 1 + power)
        power += 1
    return power


def _degrees(num: int, like: Tensor) -> Tensor:
    """Return 1, .., num in the dtype and on the device of `like`."""
    return torch.arange(1, num + 1, dtype=like.dtype, device=like.device)


def finite(scores: Tensor) -> Tensor:
    """Replace -inf with 0, because -inf minus -inf is NaN."""
    return scores.where(scores != -torch.inf, 0)


class _Statistics(torch.autograd.Function):
    """Scores [B, C] -> leaders [B, m], power sums [B, p].

    The gradient of a score that is not a leader is a polynomial in its term.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BC: Tensor, left_out_B: Tensor, k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        leaders, columns = _leaders(scores_BC, left_out_B, min(2 * k, scores_BC.shape[1]))
        left_out = left_out_B[:, None].where(left_out_B[:, None] >= 0, columns[:, :1])
        dropped = torch.cat([columns, left_out], dim=1)
        terms = _terms(scores_BC, leaders[:, -1:], dropped, scale)
        sums = _power_sums(terms, _num_powers(k, scores_BC.dtype))
        ctx.save_for_backward(terms, dropped)
        ctx.scale = scale
        return pad(leaders, (0, 2 * k - leaders.shape[1]), value=-torch.inf), sums

    @staticmethod
    def backward(ctx: Any, grad_leaders: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        terms, dropped = ctx.saved_tensors
        coefficients = grad_sums * (ctx.scale * _degrees(grad_sums.shape[1], grad_sums))
        grad = _evaluate(terms, coefficients)
        grad.scatter_(1, dropped[:, :-1], grad_leaders[:, : dropped.shape[1] - 1])
        return grad, None, None, None


def _leaders(scores_BC: Tensor, left_out_B: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` largest scores of each row, descending, and their columns; the score of the
    column `left_out` is treated as -inf."""
    left_out = left_out_B[:, None]
    values, columns = scores_BC.topk(min(num + 1, scores_BC.shape[1]), dim=1)
    if columns.shape[1] == num:
        # All columns were selected. In rows with a column to leave out, it moves to the end.
        values = pad(values, (0, 1), value=-torch.inf)
        columns = torch.cat([columns, left_out.clamp(min=0)], dim=1)
    positions = torch.arange(num, device=columns.device)
    positions = positions + (columns[:, :num] == left_out).cumsum(1)
    return values.gather(1, positions), columns.gather(1, positions)


def _terms(scores_BC: Tensor, reference_B1: Tensor, dropped: Tensor, scale: float) -> Tensor:
    """Return exp(scale (z - reference)) of scores z [B, C], zero in the columns `dropped` of each
    row."""
    # Smaller terms are negligible, and their squares would be denormal numbers, which are slow.
    floor = math.log2(torch.finfo(scores_BC.dtype).tiny) / 2
    # exp2 is several times faster than exp on a CPU.
    logs = (scores_BC - finite(reference_B1)).mul_(scale * math.log2(math.e))
    return threshold(logs, floor, -torch.inf, inplace=True).exp2_().scatter_(1, dropped, 0)


def _power_sums(terms_BC: Tensor, num_powers: int) -> Tensor:
    """Return the sums [B, p] of the powers of the terms."""
    eps, sums = torch.finfo(terms_BC.dtype).eps, [terms_BC.sum(1)]
    for degree in range(2, num_powers + 1):
        if degree == 2:
            raised = terms_BC * terms_BC
        else:
            raised.mul_(terms_BC)
        # Powers below eps are negligible relative to the leaders. Set them to zero, because
        # arithmetic with denormal numbers is slow.
        if degree % 4 == 2:
            threshold(raised, eps ** min(degree, 4), 0, inplace=True)
        sums.append(raised.sum(1))
    return torch.stack(sums, 1)


def _evaluate(terms_BC: Tensor, coefficients_Bp: Tensor) -> Tensor:
    """Return the sum over r of coefficients[:, r - 1] terms^r [B, C], by Horner's rule."""
    highest, *lower = coefficients_Bp.flip(1).split(1, dim=1)
    value = terms_BC * highest
    for degree, coefficient in enumerate(lower):
        if degree == 0:
            value.add_(coefficient)
        else:
            torch.addcmul(coefficient, value, terms_BC, out=value)
    return value.mul_(terms_BC) if lower else value

"""Paper 003's algorithms for the smooth top-k loss, as printed, to compare with kway's.

The code is plain torch and is differentiated by autograd unless stated otherwise.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

# Shape legend: B rows, n scores per row, k the highest degree.

# log sigma_(k-1) and log sigma_k [B] of exp(scores [B, n])
Polynomials = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def smooth_topk(
    logits_BK: Tensor, labels: Tensor, polynomials: Polynomials, *, k: int, tau: float
) -> Tensor:
    """Return the mean of Eq. 10 over the rows."""
    num_classes = logits_BK.shape[1]
    others = torch.arange(num_classes - 1, device=logits_BK.device).expand(len(labels), -1)
    others = others + (others >= labels[:, None])
    lower, upper = polynomials(logits_BK.gather(1, others) / (k * tau), k)
    true = logits_BK.gather(1, labels[:, None]).squeeze(1)
    return (tau * softplus(1 / tau - true / (k * tau) + upper - lower)).mean()


def summation(scores_Bn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Algorithm 3: a loop over the scores, without a gradient.

    The inner loop over degrees is one operation in a preallocated buffer.
    """
    terms = scores_Bn.detach().exp()
    sigma = terms.new_zeros(k + 1, len(terms))
    sigma[0] = 1
    product = torch.empty_like(sigma[1:])
    for term in terms.T.contiguous().unbind():
        torch.mul(sigma[:-1], term, out=product)
        sigma[1:] += product
    return sigma[k - 1].log(), sigma[k].log()


def divide_and_conquer(scores_Bn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 in log space (appendix B.2.1).

    Neighboring polynomials, initially 1 + e_i X, are multiplied up to degree k until one is left.
    This is Eq. 13 without the intermediate step of 1 / e.
    """
    log_sigma = log_polynomials(scores_Bn, k)
    return log_sigma[k - 1], log_sigma[k]


def log_polynomials(scores_Bn: Tensor, k: int) -> list[Tensor]:
    """Return log sigma_0..k, each [B]. Raises ValueError for fewer than k scores."""
    if scores_Bn.shape[1] < k:
        raise ValueError(
            f"a symmetric polynomial of degree {k} needs at least {k} scores, but there are "
            f"{scores_Bn.shape[1]}: use a smaller k"
        )
    # Coefficients by degree, each [B, polynomials].
    parts, odd = [torch.zeros_like(scores_Bn), scores_Bn], []
    while (count := parts[0].shape[1]) > 1:
        if count % 2:
            odd.append([part[:, -1:] for part in parts])
        even = count // 2 * 2
        left = [part[:, 0:even:2] for part in parts]
        right = [part[:, 1:even:2] for part in parts]
        parts = _product(left, right, k)
    for rest in odd:
        parts = _product(parts, rest, k)
    return [part.squeeze(1) for part in parts]


def _product(left: list[Tensor], right: list[Tensor], k: int) -> list[Tensor]:
    """Multiply polynomials up to degree k in log space."""
    products: list[list[Tensor]] = [[] for _ in range(min(k + 1, len(left) + len(right) - 1))]
    for i, one in enumerate(left):
        for j, other in enumerate(right[: len(products) - i]):
            products[i + j].append(one + other)
    return [reduce(torch.logaddexp, terms) for terms in products]


def with_custom_backward(scores_Bn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 forward, Algorithm 2 backward: d sigma_j / d e_i from d sigma_(j-1) / d e_i.

    The approximation for unstable elements (appendix B.2.2) is not implemented.
    """
    lower, upper = _CustomBackward.apply(scores_Bn, k)
    return lower, upper


class _CustomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_Bn: Tensor, k: int) -> tuple[Tensor, Tensor]:
        log_sigma = log_polynomials(scores_Bn, k)
        ctx.save_for_backward(scores_Bn, *log_sigma)
        return log_sigma[k - 1], log_sigma[k]

    @staticmethod
    def backward(ctx: Any, grad_lower: Tensor, grad_upper: Tensor) -> tuple[Tensor, None]:
        scores_Bn, *log_sigma = ctx.saved_tensors
        delta = torch.zeros_like(scores_Bn)  # log of d sigma_1 / d e_i
        by_degree = [delta]
        for j in range(2, len(log_sigma)):
            # log(sigma_(j-1) - e_i delta_(j-1))
            whole = log_sigma[j - 1][:, None]
            part = (scores_Bn + delta - whole).clamp(max=0).exp()
            delta = whole + torch.log1p(-part)
            by_degree.append(delta)
        grad = torch.zeros_like(scores_Bn)
        for degree, by_sigma in ((-2, grad_lower), (-1, grad_upper)):
            if len(log_sigma) + degree > 0:  # sigma_0 is constant
                probability = (scores_Bn + by_degree[degree] - log_sigma[degree][:, None]).exp()
                grad += by_sigma[:, None] * probability
        return grad, None

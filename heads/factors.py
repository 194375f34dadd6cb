"""The d x d algebra of the factored head: K rows W = V U + 1 omega' and what is known of them.

Exact updates for W <- W A + 1 c' + (a few rows), after Vincent, de Brebisson and Bouchard 2015
(arXiv 1412.7091). Pure float64 tensor algebra: no V, no ranks, no losses.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """`transform` U [d, d] and `shift` omega [d]."""

    transform: Tensor
    shift: Tensor

    @classmethod
    def identity(cls, like: Tensor) -> "Factors":
        """U = I and omega = 0, for rows as those of `like` [n, d]."""
        eye = torch.eye(like.shape[1], dtype=torch.float64, device=like.device)
        return cls(eye, torch.zeros_like(eye[0]))

    def rows(self, held: Tensor) -> Tensor:
        """Rows of V [n, d] -> of W, float64."""
        return torch.addmm(self.shift, held.double(), self.transform)

    def then(self, linear: Tensor, shift: Tensor) -> "Factors":
        """Those of W A + 1 c'."""
        return Factors(self.transform @ linear, self.shift @ linear + shift)

    def inverse(self, max_singular_value: float, dtype: torch.dtype) -> Tensor | None:
        """U^-1; None where U's singular values may leave [1/max, max] times a common scale, or the
        scale may take rows of `dtype` near the end of its range.

        What a row of V loses in its rounding grows with U's condition number, not with its scale.
        """
        inverse, info = torch.linalg.inv_ex(self.transform)
        largest, widest = torch.finfo(dtype).max ** 0.25, max_singular_value**2
        # The second bound costs more and is tight far from the identity too. NaN is outside.
        for bound in (_norm_bound, _tight_norm_bound):
            norm, inverse_norm = bound(self.transform), bound(inverse)
            inside = (norm * inverse_norm <= widest) & (norm.maximum(inverse_norm) <= largest)
            if (inside & (info == 0)).item():
                return inverse
        return None


@dataclass(frozen=True)
class Moments:
    """`gram` Q = W'W [d, d] and `total` s = W'1 [d] of `num_rows` rows."""

    gram: Tensor
    total: Tensor
    num_rows: int

    def then(self, linear: Tensor, shift: Tensor) -> "Moments":
        """Those of W A + 1 c', for a symmetric A."""
        total = linear @ self.total
        cross = torch.outer(total, shift)
        gram = linear @ self.gram @ linear + cross + cross.T
        gram += self.num_rows * torch.outer(shift, shift)
        return replace(self, gram=(gram + gram.T) / 2, total=total + self.num_rows * shift)

    def plus(self, gram: Tensor, total: Tensor) -> "Moments":
        return replace(self, gram=self.gram + gram, total=self.total + total)


@dataclass(frozen=True)
class RowsGradient:
    """G = 1 p' + W M + C: `shift` p [d], `linear` M [d, d], symmetric; C is zero but for the rows
    `sparse` [n, d] at `places` [n] of those that a rank holds."""

    shift: Tensor
    linear: Tensor
    places: Tensor
    sparse: Tensor

    def scaled(self, factor: float | Tensor) -> "RowsGradient":
        return RowsGradient(
            self.shift * factor, self.linear * factor, self.places, self.sparse * factor
        )

    def squared_norm_of_sparse(self, rows: Tensor) -> Tensor:
        """What the rows [n, d] of W at `places` add to `squared_norm_of_dense`."""
        return (self.sparse * (self.sparse + 2 * (rows @ self.linear + self.shift))).sum()

    def squared_norm_of_dense(self, moments: Moments) -> Tensor:
        """||1 p' + W M||^2."""
        of_linear = ((self.linear @ moments.gram) * self.linear).sum()
        of_both = 2 * self.shift @ self.linear @ moments.total
        return moments.num_rows * self.shift @ self.shift + of_both + of_linear


def _norm_bound(matrix: Tensor) -> Tensor:
    """At least the largest singular value: sqrt(norm_1 norm_inf), tight near the identity."""
    magnitude = matrix.abs()
    return (magnitude.sum(0).max() * magnitude.sum(1).max()).sqrt()


def _tight_norm_bound(matrix: Tensor) -> Tensor:
    """At least the largest singular value, at most d^(1/32) times it: the Frobenius norm of
    (M'M)^8 to the power 1/16."""
    power = matrix.T @ matrix
    scale = power.norm()
    power = power / scale
    for _ in range(3):
        power = power @ power
    return (scale * power.norm() ** (1 / 8)).sqrt()

"""The d x d algebra of the factored head, whose K rows are W = V U + 1 omega'.

This module computes exact updates for W <- W A + 1 c' + (a few rows), after Vincent, de Brebisson
and Bouchard 2015 (arXiv 1412.7091). It is pure float64 tensor algebra and does not depend on V,
ranks or losses.
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
        """Return U = I and omega = 0, for rows with the dimension and device of `like` [n, d]."""
        eye = torch.eye(like.shape[1], dtype=torch.float64, device=like.device)
        return cls(eye, torch.zeros_like(eye[0]))

    def rows(self, held: Tensor) -> Tensor:
        """Convert rows of V [n, d] to float64 rows of W."""
        return torch.addmm(self.shift, held.double(), self.transform)

    def then(self, linear: Tensor, shift: Tensor) -> "Factors":
        """Return the factors of W A + 1 c': (V U + 1 omega') A + 1 c' = V (U A) + 1 (...)'."""
        return Factors(self.transform @ linear, self.shift @ linear + shift)

    def inverse(self, max_singular_value: float, dtype: torch.dtype) -> Tensor | None:
        """Return U^-1, or None if the rows must be consolidated.

        They must be consolidated if the singular values of U may be outside [1/max, max], up to a
        common scale, or if that scale may bring rows of `dtype` close to the limits of its range.
        The rounding error of a row of V grows with the condition number of U, not with its scale.
        """
        inverse, info = torch.linalg.inv_ex(self.transform)
        largest, widest = torch.finfo(dtype).max ** 0.25, max_singular_value**2
        # The second bound costs more, but is also tight far from the identity. Comparisons with NaN
        # are false, so NaN leads to a consolidation.
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
        """Return the moments of W A + 1 c', for a symmetric A."""
        total = linear @ self.total
        cross = torch.outer(total, shift)
        gram = linear @ self.gram @ linear + cross + cross.T
        gram += self.num_rows * torch.outer(shift, shift)
        return replace(self, gram=(gram + gram.T) / 2, total=total + self.num_rows * shift)

    def plus(self, gram: Tensor, total: Tensor) -> "Moments":
        return replace(self, gram=self.gram + gram, total=self.total + total)


@dataclass(frozen=True)
class RowsGradient:
    """The gradient G = 1 p' + W M + C: `shift` is p [d], and `linear` is the symmetric M [d, d].

    C is zero except for the rows `sparse` [n, d], at `positions` [n] among the rank's rows.
    """

    shift: Tensor
    linear: Tensor
    positions: Tensor
    sparse: Tensor

    def scaled(self, factor: float | Tensor) -> "RowsGradient":
        return RowsGradient(
            self.shift * factor, self.linear * factor, self.positions, self.sparse * factor
        )

    def squared_norm_of_sparse(self, rows: Tensor) -> Tensor:
        """Return the contribution of C to ||G||^2, to be added to `squared_norm_of_dense`.

        `rows` [n, d] are the rows of W at `positions`.
        """
        return (self.sparse * (self.sparse + 2 * (rows @ self.linear + self.shift))).sum()

    def squared_norm_of_dense(self, moments: Moments) -> Tensor:
        """Return ||1 p' + W M||^2."""
        of_linear = ((self.linear @ moments.gram) * self.linear).sum()
        of_both = 2 * self.shift @ self.linear @ moments.total
        return moments.num_rows * self.shift @ self.shift + of_both + of_linear


def _norm_bound(matrix: Tensor) -> Tensor:
    """Return an upper bound on the largest singular value: sqrt(norm_1 norm_inf).

    The bound is tight near the identity.
    """
    magnitude = matrix.abs()
    return (magnitude.sum(0).max() * magnitude.sum(1).max()).sqrt()


def _tight_norm_bound(matrix: Tensor) -> Tensor:
    """Return an upper bound on the largest singular value, within a factor of d^(1/32).

    It is the Frobenius norm of (M'M)^8 to the power 1/16.
    """
    power = matrix.T @ matrix
    scale = power.norm()
    power = power / scale
    for _ in range(3):
        power = power @ power
    return (scale * power.norm() ** (1 / 8)).sqrt()

"""The values of a rank's tree nodes, in float32, float64, bf16 or fp8."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from heads.rows.rounding import rounded, scales_of

# Shape legend: n nodes of this rank, m ancestors of the first one, d features, P nodes on paths.

FP8 = torch.float8_e4m3fn


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which class rows of `dtype` are added up and updated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class NodeValues:
    """Values of a rank's nodes: `held` [n, d], with d = 1 for the bias.

    If `held` is fp8, the value of a node is its row in `held` times its entry in `scales` [n], a
    power of two in bf16. The product is a number of bf16 too, so reading does not round.

    `boundary` [m + 1, d] are prefix sums over the m ancestors of the rank's first node, root first:
    row i is the sum over the first i of them. All of these ancestors are on other ranks. None: this
    rank needs no nodes of other ranks.
    """

    held: Tensor
    scales: Tensor | None = None
    boundary: Tensor | None = None

    @classmethod
    def zeros(
        cls, num_nodes: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> "NodeValues":
        held = torch.zeros(num_nodes, dim, dtype=dtype, device=device)
        if dtype != FP8:
            return cls(held)
        return cls(held, torch.ones(num_nodes, dtype=torch.bfloat16, device=device))

    def read(self, nodes: slice | Tensor) -> Tensor:
        """Return the values of some of the rank's nodes [..., d], in the dtype of `held`, or in
        bf16 if that is fp8."""
        if self.scales is None:
            return self.held[nodes]
        # torch indexes bytes, but not fp8 numbers.
        values = self.held.view(torch.uint8)[nodes].view(FP8)
        return values.to(torch.bfloat16) * self.scales[nodes].unsqueeze(-1)

    def write(self, nodes: slice | Tensor, values: Tensor, bits: Tensor | None = None) -> None:
        """Write `values` [C, d], rounded to the dtype of `held`. `bits` [C, d] are for stochastic
        rounding; see `rounded`."""
        if self.held.dtype == values.dtype:
            self.held[nodes] = values
        elif self.scales is None:
            self.held[nodes] = rounded(values, self.held.dtype, bits)
        else:
            values = values.where(values.isfinite(), torch.nan)  # e4m3 has no infinity
            scales = scales_of(values)
            self.scales[nodes] = scales
            result = rounded(values / scales.unsqueeze(1), FP8, bits)
            self.held.view(torch.uint8)[nodes] = result.view(torch.uint8)

    def path_sums(self, paths: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums [C, d] over concatenated `paths` [P], which begin at `starts` [C], in at
        least float32. `weights` [P] multiply the values."""
        if self.held.dtype in (torch.float32, torch.float64):
            return embedding_bag(paths, self.held, starts, mode="sum", per_sample_weights=weights)
        values = self.read(paths).float()
        each = torch.arange(len(paths), device=paths.device)
        return embedding_bag(each, values, starts.long(), mode="sum", per_sample_weights=weights)

"""What both kernels of `heads/tiles/kernels.py` need for one block of classes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from heads import optional_triton
from heads.engine.block_size import Processor
from heads.losses import Loss
from heads.losses.tile import Tile
from heads.tiles.operators import (
    capability_of,
    config_of,
    number_of,
    write_gradient,
    write_statistics,
)

# Programs per multiprocessor in the forward pass. More than one hides the ends of programs; each
# program writes one number per row and statistic.
_WAVES = 4
# 10 times the lowest compute capability of a GPU that the kernels support.
LOWEST_CAPABILITY = 80


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of both kernels for one block of classes.

    `features` [G, d] and `rows` [C, d] have the same dtype. The logits are the products times
    `factors` [C] plus `shifts` [C]; None means 1 and 0. `vectors` [n, C] are the loss's
    `tile_vectors`. All other numbers are float32. `labels` [G] are the positions of the labels
    among the classes of this rank, outside their range for classes of other ranks; `first_class` is
    the position of the block's first class.
    """

    features: Tensor
    rows: Tensor
    factors: Tensor | None
    shifts: Tensor | None
    vectors: Tensor | None
    class_ids: Tensor
    labels: Tensor
    first_class: int

    def write_statistics(
        self, tile: Tile, splits: slice, totals: Tensor, winners: Tensor | None
    ) -> None:
        """Write the statistics of this block's `splits` to `totals` [N, splits of all blocks, G].

        `winners` [splits of all blocks, G] receives the class IDs of a MAX.
        """
        num = splits.stop - splits.start
        write_statistics(
            *self._tensors(), totals, winners, self.first_class, splits.start, num, number_of(tile)
        )

    def gradient(
        self,
        tile: Tile,
        totals: Tensor,
        winners: Tensor | None,
        grads: Tensor,
        *,
        of_shifts: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient [G, C] of the products, in the dtype of the features, and float32
        parts [n, C] of the gradient of `shifts`, which is their sum (None unless `of_shifts`).

        `grads` [N, G] are the gradients of `totals` [N, G], the statistics of all splits.
        """
        num_rows, num_classes = len(self.features), len(self.rows)
        out = self.features.new_empty(num_rows, num_classes)
        sums = None
        if of_shifts:
            # Atomic additions would need no parts, but they have no fixed order.
            row_groups = -(-num_rows // config_of(tile, self.features).rows)
            sums = out.new_empty(row_groups, num_classes, dtype=torch.float32)
        others = totals, winners, grads, out, sums
        write_gradient(*self._tensors(), *others, self.first_class, number_of(tile))
        return out, sums

    def _tensors(self) -> Iterator[Tensor | None]:
        tensors = (
            self.features,
            self.rows,
            self.factors,
            self.shifts,
            self.vectors,
            self.class_ids,
            self.labels,
        )
        return (None if each is None else each.contiguous() for each in tensors)


def check_tiles(loss: Loss, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if the kernels cannot compute a loss on a device, or products of `dtype`."""
    if loss.tile is None:
        raise ValueError(
            f"{loss.kind} does not support tiles, because {loss.without_tile}: set head.tiles=false"
        )
    if not optional_triton.is_installed:
        raise ValueError("head.tiles needs Triton: run pip install triton, or set head.tiles=false")
    if device.type != "cuda" and not optional_triton.interprets:
        raise ValueError(
            f"head.tiles needs an NVIDIA GPU, but the head is on {device}: set head.tiles=false"
        )
    if torch.version.hip is not None:
        raise ValueError(
            "head.tiles needs an NVIDIA GPU, but torch was built for ROCm: set head.tiles=false"
        )
    if device.type == "cuda" and capability_of(device) < LOWEST_CAPABILITY:
        raise ValueError(
            f"head.tiles needs a GPU of compute capability 8.0 or later, not {device}: set "
            "head.tiles=false"
        )
    if dtype == torch.float64:
        raise ValueError(
            "head.tiles does not support float64: use float32 features and weights, or set "
            "head.tiles=false"
        )


def num_splits(tile: Tile, features: Tensor, num_classes: int) -> int:
    """Return the number of programs among which a kernel divides the classes of a block, for each
    group of rows."""
    config = config_of(tile, features)
    row_groups = -(-len(features) // config.rows)
    tiles = -(-num_classes // config.classes)
    num_sms = max(1, Processor.of(features.device).num_sms)  # 1 for the interpreter
    return num_splits_of(row_groups, tiles, num_sms)


def num_splits_of(row_groups: int, tiles: int, num_sms: int) -> int:
    """Return the number of programs for each group of rows of a block with `tiles` groups of
    classes."""
    return max(1, min(tiles, _WAVES * num_sms // max(row_groups, 1)))

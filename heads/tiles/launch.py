"""Launches of the kernels in `heads/tiles/kernels.py` for one block of classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads import optional_triton
from heads.engine.block_size import Processor
from heads.losses import Loss
from heads.losses.tile import Reduction, Tile
from heads.tiles import kernels

# Programs per multiprocessor in the forward pass. More than one hides the ends of programs; each
# program writes one number per row and statistic.
_WAVES = 4
# 10 times the lowest compute capability of a GPU that the kernels support.
LOWEST_CAPABILITY = 80


@dataclass(frozen=True)
class KernelConfig:
    """The size of a tile and the resources of a program that computes it."""

    rows: int
    classes: int
    features: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def resources(self) -> dict[str, int | None]:
        """The options with which Triton compiles a kernel."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


# Tiles of 128 x 128 use 64 registers of each of 256 threads for the logits, and leave room for the
# terms: no configuration spills registers (tests/heads/tiles/test_compiled.py). Three stages take
# 96 KiB of shared memory on Hopper, and 64 KiB on compute capabilities 8.6 and 8.9, which allow 99.
_HALF = KernelConfig(128, 128, 64, num_warps=8, num_stages=3)
# Without tensor cores, a float32 product needs the registers for its operands. Without a limit, the
# assembler uses only 80 registers, so that three programs fit a multiprocessor, and spills some.
_FLOAT = KernelConfig(64, 64, 16, num_warps=8, num_stages=2, max_registers=128)
# On Blackwell, the copy of the logits from tensor memory needs registers, too.
_NARROW_HALF = KernelConfig(128, 64, 64, num_warps=8, num_stages=3)
# The interpreter needs as long for a small tile as for a large one, but tests must cross tiles.
_INTERPRETED = KernelConfig(16, 32, 16, num_warps=1, num_stages=1)


def kernel_config(tile: Tile, dtype: torch.dtype, capability: int) -> KernelConfig:
    """Return the configuration for a loss with `tile`, and features and rows of `dtype`.

    `capability` is that of `capability_of`.
    """
    if dtype == torch.float32:
        return _FLOAT
    return _NARROW_HALF if tile.narrow or capability >= 100 else _HALF


def kernel_options(tile: Tile, config: KernelConfig) -> dict[str, Any]:
    """Return the arguments that both kernels treat as constants."""
    return {
        "TERMS": tile.terms,
        "IS_LOGSUMEXP": tuple(each is Reduction.LOGSUMEXP for each in tile.reductions),
        "BLOCK_G": config.rows,
        "BLOCK_C": config.classes,
        "BLOCK_D": config.features,
    }


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of both kernels for one block of classes.

    `features` [G, d] and `rows` [C, d] have the same dtype. The logits are the products times
    `factors` [C] plus `shifts` [C], both float32; None means 1 and 0. `labels` [P] are positions
    among the classes of this rank, outside their range for classes of other ranks: one per row, or
    those of row g from `label_offsets[g]` to `label_offsets[g + 1]`. `first_class` is the position
    of the block's first class.
    """

    features: Tensor
    rows: Tensor
    factors: Tensor | None
    shifts: Tensor | None
    labels: Tensor
    label_offsets: Tensor | None
    first_class: int

    def write_statistics(self, tile: Tile, splits: slice, totals: Tensor) -> None:
        """Write the statistics of this block's `splits` to `totals` [N, splits of all blocks, G].

        Each split is computed by a program for each group of rows.
        """
        self._launch(
            kernels.statistics_kernel,
            tile,
            splits.stop - splits.start,
            (totals,),
            first_split=splits.start,
            all_splits=totals.shape[1],
        )

    def gradient(
        self, tile: Tile, totals: Tensor, grads: Tensor, *, of_shifts: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient [G, C] of the products, in the dtype of the features, and float32
        parts [n, C] of the gradient of `shifts`, which is their sum (None unless `of_shifts`).

        `grads` [N, G] are the gradients of `totals` [N, G], the statistics of all splits.
        """
        num_rows, num_classes = len(self.features), len(self.rows)
        config = config_of(tile, self.features)
        out = self.features.new_empty(num_rows, num_classes)
        sums = None
        if of_shifts:
            # Atomic additions would need no parts, but they have no fixed order.
            row_groups = -(-num_rows // config.rows)
            sums = out.new_empty(row_groups, num_classes, dtype=torch.float32)
        self._launch(
            kernels.gradient_kernel,
            tile,
            -(-num_classes // config.classes),
            (totals, grads, out, sums),
            SLOPES=tile.slopes,
        )
        return out, sums

    def _launch(
        self,
        kernel: Any,
        tile: Tile,
        per_row_group: int,
        others: tuple[Tensor | None, ...],
        **scalars: Any,
    ) -> None:
        """Launch `per_row_group` programs of a kernel for each group of rows."""
        inputs = (
            self.features, self.rows, self.factors, self.shifts, self.labels, self.label_offsets
        )  # fmt: skip
        config = config_of(tile, self.features)
        num_rows, dim = self.features.shape
        with torch.cuda.device_of(self.features):  # Triton launches on the current device
            kernel[(-(-num_rows // config.rows) * per_row_group,)](
                *(None if each is None else each.contiguous() for each in inputs),
                *others,
                num_rows=num_rows,
                num_classes=len(self.rows),
                dim=dim,
                first_class=self.first_class,
                **scalars,
                **kernel_options(tile, config),
                **config.resources,
            )


def check_tiles(loss: Loss, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if the kernels cannot compute a loss on a device, or products of `dtype`."""
    if loss.tile is None:
        raise ValueError(
            f"{loss.kind} does not support tiles, because {loss.without_tile}: set head.tiles=false"
        )
    if not optional_triton.is_installed:
        raise ValueError("head.tiles needs Triton: run pip install triton, or set head.tiles=false")
    is_supported = optional_triton.interprets
    if device.type == "cuda":
        is_supported = torch.version.hip is None and _capability_of(device) >= LOWEST_CAPABILITY
    if not is_supported:
        raise ValueError(
            "head.tiles needs an NVIDIA GPU of compute capability 8.0 or later, but the head is on "
            f"{device}: set head.tiles=false"
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
    return max(1, min(tiles, _WAVES * num_sms // max(row_groups, 1)))


def config_of(tile: Tile, features: Tensor) -> KernelConfig:
    """Return the configuration for a loss with `tile`, and for the device and dtype of features."""
    if not features.is_cuda:
        return _INTERPRETED
    return kernel_config(tile, features.dtype, _capability_of(features.device))


def _capability_of(device: torch.device) -> int:
    """Return 10 times the compute capability of a GPU, for example 90 for an H100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

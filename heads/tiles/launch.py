"""Launch the kernels of `heads/tiles/kernels.py` for one block of classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads import optional_triton
from heads.block_size import Processor
from heads.losses import Loss
from heads.losses.tile import Reduction, Tile
from heads.tiles import kernels

# Programs per multiprocessor in the forward pass. More than one hides the ends of programs; each
# program writes one number per row and statistic.
_WAVES = 4

_CODES = {
    Reduction.SUM: kernels.SUM,
    Reduction.LOGSUMEXP: kernels.LOGSUMEXP,
    Reduction.MAX: kernels.MAX,
}


@dataclass(frozen=True)
class KernelConfig:
    """The size of a tile and the resources of a program that computes it."""

    rows: int
    classes: int
    features: int
    num_warps: int
    num_stages: int


# Tiles of 128 x 128 use 64 registers of each of 256 threads for the logits, and leave room for the
# terms: no configuration spills registers (tests/heads/tiles/test_compiled.py).
_HALF = KernelConfig(128, 128, 64, num_warps=8, num_stages=3)
# Without tensor cores, a float32 product needs the registers for its operands.
_FLOAT = KernelConfig(64, 64, 16, num_warps=8, num_stages=2)
# On Blackwell, the copy of the logits from tensor memory needs registers, too.
_NARROW_HALF = KernelConfig(128, 64, 64, num_warps=8, num_stages=3)
# The interpreter needs as long for a small tile as for a large one, but tests must cross tiles.
_INTERPRETED = KernelConfig(16, 32, 16, num_warps=1, num_stages=1)


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
        outputs = totals, winners
        sizes = *self._sizes, splits.start, totals.shape[1]
        num = splits.stop - splits.start
        self._launch(kernels.statistics_kernel, tile, num, *outputs, *sizes)

    def gradient(self, tile: Tile, totals: Tensor, winners: Tensor | None, grads: Tensor) -> Tensor:
        """Return the gradient [G, C] of the products, in the dtype of the features.

        `grads` [N, G] are the gradients of `totals` [N, G], the statistics of all splits.
        """
        out = self.features.new_empty(len(self.features), len(self.rows))
        tensors = totals, winners, grads, out
        num = -(-len(self.rows) // _config(tile, self.features).classes)
        self._launch(kernels.gradient_kernel, tile, num, *tensors, *self._sizes, SLOPES=tile.slopes)
        return out

    @property
    def _num_vectors(self) -> int:
        return 0 if self.vectors is None else len(self.vectors)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return len(self.features), len(self.rows), self.features.shape[1], self.first_class

    def _launch(
        self, kernel: Any, tile: Tile, per_row_group: int, *arguments: Any, **constants: Any
    ) -> None:
        """Launch `per_row_group` programs of a kernel for each group of rows."""
        config = _config(tile, self.features)
        inputs = (
            self.features,
            self.rows,
            self.factors,
            self.shifts,
            self.vectors,
            self.class_ids,
            self.labels,
        )
        with torch.cuda.device_of(self.features):  # Triton launches on the current device
            kernel[(-(-len(self.features) // config.rows) * per_row_group,)](
                *(None if each is None else each.contiguous() for each in inputs),
                *arguments,
                **kernel_options(tile, self._num_vectors, config),
                **constants,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )


def check_tiles(loss: Loss, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if the kernels cannot compute a loss on a device."""
    if loss.tile is None:
        raise ValueError(
            f"{loss.kind} does not support tiles, because {loss.without_tile}: set head.tiles=false"
        )
    if not optional_triton.is_installed:
        raise ValueError(
            "head.tiles needs Triton: run pip install 'kway[gpu]', or set head.tiles=false"
        )
    if device.type != "cuda" and not optional_triton.interprets:
        raise ValueError(
            f"head.tiles needs an NVIDIA GPU, but the head is on {device}: set head.tiles=false"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            f"head.tiles needs a GPU of compute capability 8.0 or later, not {device}: set "
            "head.tiles=false"
        )
    if dtype == torch.float64:
        raise ValueError("tiles do not support float64: use float32, or pass tiles=False")


def num_splits(tile: Tile, features: Tensor, num_classes: int) -> int:
    """Return the number of programs among which a kernel divides the classes of a block, for each
    group of rows."""
    config = _config(tile, features)
    row_groups = -(-len(features) // config.rows)
    tiles = -(-num_classes // config.classes)
    num_sms = max(1, Processor.of(features.device).num_sms)  # 1 for the interpreter
    return num_splits_of(row_groups, tiles, num_sms)


def num_splits_of(row_groups: int, tiles: int, num_sms: int) -> int:
    """Return the number of programs for each group of rows of a block with `tiles` groups of
    classes."""
    return max(1, min(tiles, _WAVES * num_sms // max(row_groups, 1)))


def kernel_config(tile: Tile, dtype: torch.dtype, capability: int) -> KernelConfig:
    """Return the configuration for a loss with `tile`, and features and rows of `dtype`.

    `capability` is 10 times the compute capability of the GPU, for example 90 for an H100.
    """
    if dtype == torch.float32:
        return _FLOAT
    return _NARROW_HALF if tile.narrow or capability >= 100 else _HALF


def kernel_options(tile: Tile, num_vectors: int, config: KernelConfig) -> dict[str, Any]:
    """Return the arguments that both kernels treat as constants."""
    return {
        "TERMS": tile.terms,
        "REDUCTIONS": tuple(_CODES[each] for each in tile.reductions),
        "NUM_VECTORS": num_vectors,
        "BLOCK_G": config.rows,
        "BLOCK_C": config.classes,
        "BLOCK_D": config.features,
        "PRECISION": "ieee",
        "WIDEN": optional_triton.interprets,
    }


def _config(tile: Tile, features: Tensor) -> KernelConfig:
    if not features.is_cuda:
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(features.device)
    return kernel_config(tile, features.dtype, 10 * major + minor)

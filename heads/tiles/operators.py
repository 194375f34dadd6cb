"""The launches of the kernels in `heads/tiles/kernels.py`, as operators of torch.

`torch.ops.kway.write_statistics` and `torch.ops.kway.write_gradient` each launch one kernel for a
block of classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.losses.tile import Reduction, Tile
from heads.optional_triton import operator
from heads.tiles import kernels

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

# The tiles of the losses in use. The arguments of an operator can be numbers, but not functions.
_TILES: list[Tile] = []


def number_of(tile: Tile) -> int:
    """Return the number that represents a tile in the arguments of the operators."""
    if tile not in _TILES:
        _TILES.append(tile)
    return _TILES.index(tile)


def kernel_config(tile: Tile, dtype: torch.dtype, capability: int) -> KernelConfig:
    """Return the configuration for a loss with `tile`, and features and rows of `dtype`.

    `capability` is that of `capability_of`.
    """
    if dtype == torch.float32:
        return _FLOAT
    return _NARROW_HALF if tile.narrow or capability >= 100 else _HALF


def config_of(tile: Tile, features: Tensor) -> KernelConfig:
    """Return the configuration for a loss with `tile`, and for the device and dtype of features."""
    if not features.is_cuda:
        return _INTERPRETED
    return kernel_config(tile, features.dtype, capability_of(features.device))


def capability_of(device: torch.device) -> int:
    """Return 10 times the compute capability of a GPU, for example 90 for an H100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def kernel_options(tile: Tile, num_vectors: int, config: KernelConfig) -> dict[str, Any]:
    """Return the arguments that both kernels treat as constants."""
    return {
        "TERMS": tile.terms,
        "REDUCTIONS": tuple(_CODES[each] for each in tile.reductions),
        "NUM_VECTORS": num_vectors,
        "BLOCK_G": config.rows,
        "BLOCK_C": config.classes,
        "BLOCK_D": config.features,
    }


@operator("totals", "winners")
def write_statistics(
    features: Tensor,
    rows: Tensor,
    factors: Tensor | None,
    shifts: Tensor | None,
    vectors: Tensor | None,
    class_ids: Tensor,
    labels: Tensor,
    totals: Tensor,
    winners: Tensor | None,
    first_class: int,
    first_split: int,
    num_splits: int,
    tile: int,
) -> None:
    """Launch `statistics_kernel` with `num_splits` programs for each group of rows."""
    _launch(
        kernels.statistics_kernel,
        _TILES[tile],
        num_splits,
        (features, rows, factors, shifts, vectors, class_ids, labels, totals, winners),
        first_class=first_class,
        first_split=first_split,
        all_splits=totals.shape[1],
    )


@operator("out", "column_sums")
def write_gradient(
    features: Tensor,
    rows: Tensor,
    factors: Tensor | None,
    shifts: Tensor | None,
    vectors: Tensor | None,
    class_ids: Tensor,
    labels: Tensor,
    totals: Tensor,
    winners: Tensor | None,
    grads: Tensor,
    out: Tensor,
    column_sums: Tensor | None,
    first_class: int,
    tile: int,
) -> None:
    """Launch `gradient_kernel` with a program for each tile."""
    block = features, rows, factors, shifts, vectors, class_ids, labels
    _launch(
        kernels.gradient_kernel,
        _TILES[tile],
        -(-len(rows) // config_of(_TILES[tile], features).classes),
        (*block, totals, winners, grads, out, column_sums),
        first_class=first_class,
        SLOPES=_TILES[tile].slopes,
    )


def _launch(
    kernel: Any,
    tile: Tile,
    per_row_group: int,
    tensors: tuple[Tensor | None, ...],
    **scalars: Any,
) -> None:
    """Launch `per_row_group` programs of a kernel for each group of rows."""
    features, rows, _, _, vectors, *_ = tensors
    assert features is not None
    assert rows is not None
    config = config_of(tile, features)
    num_rows, dim = features.shape
    with torch.cuda.device_of(features):  # Triton launches on the current device
        kernel[(-(-num_rows // config.rows) * per_row_group,)](
            *tensors,
            num_rows=num_rows,
            num_classes=len(rows),
            dim=dim,
            **scalars,
            **kernel_options(tile, 0 if vectors is None else len(vectors), config),
            **config.resources,
        )

"""A Triton kernel that updates class rows on a GPU, as `heads/rows/row_update.py` does with torch.

Torch operations would read or write about 100 bytes for each number, and this kernel 8: it reads
the gradient and the row, and writes the row. Its random bits are those of `heads/rows/hashing.py`
and its rounding that of `heads/rows/rounding.py`, so that a row is the same on every device, except
for the last bits of the unrounded sum.
"""

import torch
from torch import Tensor

from heads.optional_triton import is_installed, jit, tl
from heads.rows.node_values import FP8, NodeValues

# Formats of rows. Triton reads only globals that are `tl.constexpr`.
FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP8_E4M3 = tl.constexpr(2)
_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, FP8: FP8_E4M3}

# The constants of `heads/rows/hashing.py`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)

# Numbers of a row for which a program uses a warp.
_NUMBERS_PER_WARP = 256


def block_size(dim: int) -> int:
    """Return the smallest power of two that is at least `dim`: Triton loads no other numbers."""
    return 1 << (dim - 1).bit_length()


def num_warps(dim: int) -> int:
    return min(8, max(1, block_size(dim) // _NUMBERS_PER_WARP))


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether the kernel updates rows of `dtype` on GPUs."""
    return is_installed and dtype in _FORMATS


def update(
    values: NodeValues,
    nodes: slice | Tensor,
    grad: Tensor,
    *,
    first_node: int,
    keeps: Tensor,
    divisor: Tensor | None,
    lr: float,
    weight_decay: float,
    key: int,
) -> Tensor:
    """Update `nodes` [C] of `values`, given their float32 gradients `grad` [C, d]; return the
    squared norms [C] of the gradients.

    `keeps`, a scalar or [C], is true where nothing changes. `first_node` is the ID of the first
    node of `values`, and `key` the seed of the random bits.
    """
    held, scales, indices = values.held, values.scales, None
    if isinstance(nodes, slice):
        held, scales = held[nodes], None if scales is None else scales[nodes]
        first_node += nodes.start
    else:
        indices = nodes
    num_rows, dim = grad.shape
    squares = grad.new_empty(num_rows)
    if not num_rows:
        return squares
    with torch.cuda.device_of(held):  # Triton launches on the current device
        update_kernel[(num_rows,)](
            grad.contiguous(),
            held.view(torch.uint8) if held.dtype == FP8 else held,
            scales,
            indices,
            first_node,
            keeps.contiguous().view(torch.uint8),
            None if divisor is None else divisor.float(),
            squares,
            lr,
            weight_decay,
            key,
            dim,
            FORMAT=_FORMATS[held.dtype],
            KEEPS_EACH=keeps.ndim > 0,
            BLOCK_D=block_size(dim),
            num_warps=num_warps(dim),
        )
    return squares


@jit
def _mixed(bits):
    """Apply the finalizer of splitmix64 to uint64."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@jit
def _random_bits(key, node, column, NUM_BITS: tl.constexpr):
    golden = tl.full([1], _GOLDEN, tl.uint64)
    of_seed = _mixed(key.to(tl.uint64) + golden)
    of_row = _mixed(of_seed + node.to(tl.uint64) * golden)
    PER_HASH: tl.constexpr = 64 // NUM_BITS
    bits = _mixed(of_row + (column // PER_HASH + 1).to(tl.uint64) * golden)
    shifted = bits >> (column % PER_HASH * NUM_BITS).to(tl.uint64)
    return shifted.to(tl.int32) & ((1 << NUM_BITS) - 1)


@jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _from_e4m3(byte):
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte > 127, -value, value)


@jit
def _to_e4m3(value, bits):
    """Round at random to the bytes of e4m3 numbers; `value` is at most 448."""
    raw = value.to(tl.int32, bitcast=True)
    is_small = tl.abs(value) < 0.015625
    small = tl.where(is_small, tl.abs(value) * 512.0, 0.0)
    small = tl.floor(small + (bits.to(tl.float32) + 0.5) * 9.5367431640625e-07)
    normal = (((raw + bits) & 0x7FFFFFFF) >> 20) - (120 << 3)
    byte = tl.where(is_small, small.to(tl.int32), normal)
    byte = tl.where(value == value, byte, 0x7F)
    return (byte | ((raw >> 24) & 0x80)).to(tl.uint8)


@jit
def _to_bf16(value, bits):
    """Round at random; the result is float32."""
    raw = value.to(tl.int32, bitcast=True)
    result = ((raw + bits) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), result, value)


@jit(do_not_specialize=["first_node", "key"])
def update_kernel(
    grad,  # [C, d], float32
    held,  # [n, d]
    scales,  # [n], bf16, or None
    nodes,  # [C] or None
    first_node,
    keeps,  # [C] or a scalar
    divisor,  # a scalar or None
    squares,  # [C], output
    lr,
    weight_decay,
    key,
    dim,
    FORMAT: tl.constexpr,
    KEEPS_EACH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = row
    if nodes is not None:
        node = tl.load(nodes + row)
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    change = tl.load(grad + row * dim + d, inside, 0.0)
    tl.store(squares + row, tl.sum(change * change))
    keep = tl.load(keeps + row) if KEEPS_EACH else tl.load(keeps)
    if keep == 0:
        old = tl.load(held + node * dim + d, inside, 0)
        if FORMAT == FP8_E4M3:
            old = _from_e4m3(old) * tl.load(scales + node).to(tl.float32)
        old = old.to(tl.float32)
        if divisor is not None:
            change /= tl.load(divisor)
        new = old - lr * (change + weight_decay * old)
        if FORMAT == FP8_E4M3:
            # The smallest power of two for which the row is at most 448 = 1.75 * 2^8.
            is_finite = tl.abs(new) < float("inf")
            raw = tl.max(tl.where(is_finite, tl.abs(new), 0.0)).to(tl.int32, bitcast=True)
            exponent = (raw >> 23) - 127 - 8 + tl.where((raw & 0x7FFFFF) > 0x600000, 1, 0)
            exponent = tl.where(raw == 0, 0, tl.minimum(tl.maximum(exponent, -100), 100))
            tl.store(scales + node, _power_of_two(exponent).to(tl.bfloat16))
            new = tl.where(is_finite, new * _power_of_two(-exponent), float("nan"))
            bits = _random_bits(key.to(tl.int64), first_node + node, d, 20)
            new = _to_e4m3(new, bits)
        elif FORMAT == BF16:
            bits = _random_bits(key.to(tl.int64), first_node + node, d, 16)
            new = _to_bf16(new, bits).to(tl.bfloat16)
        tl.store(held + node * dim + d, new, inside)

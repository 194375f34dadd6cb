"""Random bits as a function of (seed, row, column), without the state of a generator.

The bits of a number depend on neither the device, nor the number of ranks, nor the other numbers
that are drawn with it.
"""

import torch
from torch import Tensor

# The constants of splitmix64 (Steele, Lea, Flood 2014) as int64. Integer products and sums of torch
# wrap around, so they have the same bits as those of uint64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def hashes(rows: Tensor, num_columns: int, *, seed: int) -> Tensor:
    """Return hashes of (seed, row, column), int64 [n, num_columns], for `rows` [n], int64.

    `mix` is a bijection, so two rows never have the same hashes.
    """
    columns = torch.arange(1, num_columns + 1, device=rows.device) * GOLDEN
    of_seed = mix(torch.full((1,), seed, device=rows.device) + GOLDEN)
    of_row = mix(of_seed + rows * GOLDEN)
    return mix(of_row.unsqueeze(1) + columns)


def random_bits(rows: Tensor, num_columns: int, num_bits: int, *, seed: int) -> Tensor:
    """Return integers of `num_bits` bits as int32 [n, num_columns], for `rows` [n], int64.

    A hash has 64 bits, so it contains four numbers of 16 bits or three of 20.
    """
    per_hash = 64 // num_bits
    drawn = hashes(rows, -(-num_columns // per_hash), seed=seed)
    if num_bits == 16:  # faster than shifts
        return drawn.view(torch.int16)[:, :num_columns].int().bitwise_and_(0xFFFF)
    shifts = torch.arange(per_hash, device=rows.device) * num_bits
    numbers = (drawn.unsqueeze(2) >> shifts).bitwise_and_((1 << num_bits) - 1)
    return numbers.flatten(1)[:, :num_columns].int()


def rows_at_once(dim: int, device: torch.device) -> int:
    """Return the number of rows whose hashes are computed together: 2 MiB of int64 on a CPU, which
    stay in its caches, and 32 MiB on a GPU, where running a kernel should take longer than
    launching it."""
    numbers = 1 << 18 if device.type == "cpu" else 1 << 22
    return max(1, numbers // dim)


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shift int64 to the right by `by` bits, with zeros on the left as for uint64."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place."""
    for shift, factor in _MIX:
        bits.bitwise_xor_(shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(shifted(bits, 31))

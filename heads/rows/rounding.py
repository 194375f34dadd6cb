"""Rounding to bf16 and fp8, at random in proportion to the distance.

A small update of a weight would be lost if the result were rounded to the nearest number. With
stochastic rounding, the result is one of the two adjacent numbers, and its expected value is the
unrounded one. A number that needs no rounding keeps its value.

fp8 numbers (e4m3, 3 bits of mantissa) have a common scale per row. It is the smallest power of two
for which the row fits into the range of e4m3, so a change of the scale rounds no number, except for
the smallest ones: the exponents of e4m3 cover only a factor of 2^15.
"""

import torch
from torch import Tensor

_FP8 = torch.float8_e4m3fn
# Of a rounded number: as many as the bits of the float32 mantissa that rounding removes.
NUM_RANDOM_BITS = {torch.bfloat16: 16, _FP8: 20}
# Below the smallest normal number, e4m3 numbers are multiples of 2^-9.
_SMALLEST_NORMAL_FP8, _STEPS_PER_UNIT = 2.0**-6, 2.0**9
# Extreme scales would not be normal numbers of bf16, in which scales are stored.
_LARGEST_EXPONENT = 100


def scales_of(values: Tensor) -> Tensor:
    """Return the scales [n] of fp8 rows, powers of two in bf16, for the finite numbers in `values`
    [n, d]. The scale of a row of zeros is 1."""
    largest = values.abs().nan_to_num_(nan=0, posinf=0).amax(1)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 * 2^9
    exponent = exponent - 9 + (mantissa > 0.875).int()
    exponent = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    scales = torch.ldexp(torch.ones_like(largest), exponent)
    return scales.where(largest > 0, 1).to(torch.bfloat16)


def rounded(values: Tensor, dtype: torch.dtype, bits: Tensor | None = None) -> Tensor:
    """Round float32 `values` [n, d] to bf16 or fp8 (e4m3, at most 448 in absolute value).

    `bits` [n, d] are the `random_bits` for stochastic rounding, `NUM_RANDOM_BITS[dtype]` each; None
    rounds to the nearest number. NaN stays NaN; in bf16, infinity stays infinity.
    """
    if bits is None:
        return values.to(dtype)
    # Adding a random number to the bits below the mantissa carries with the right probability.
    num_bits = NUM_RANDOM_BITS[dtype]
    result = (values.view(torch.int32) + bits).bitwise_and_(-(1 << num_bits)).view(torch.float32)
    if dtype == _FP8:
        steps = (values.abs() * _STEPS_PER_UNIT).add_(bits + 0.5, alpha=2.0**-num_bits).floor_()
        small = steps.div_(_STEPS_PER_UNIT).copysign_(values)
        result = torch.where(values.abs() < _SMALLEST_NORMAL_FP8, small, result)
    return result.where(~values.isnan(), values).to(dtype)  # adding bits keeps infinity

"""Peak rates, memory and SMs of GPUs, for `kway plan`.

Rates are for dense matrices and come from NVIDIA's data sheets for V100, T4, A10, A100, L4, L40S,
H100, H200 (nvidia.com/data-center/<name>) and HGX B200. The larger numbers in these data sheets are
for structured sparsity. Memory is the size that the driver reports, which is less than the nominal
size.
"""

from dataclasses import dataclass
from typing import Literal

Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]

_MIB = 2**20
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """A GPU model.

    `num_sms` is the number of streaming multiprocessors (SMs). Memory is in bytes, bandwidths are
    in bytes per second, and peak rates are in operations per second. The link bandwidth is the
    one-way bandwidth between two GPUs in the same machine, over NVLink if available and otherwise
    over PCIe.
    """

    num_sms: int
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    peaks: dict[Arithmetic, float]


def _device(
    num_sms: int,
    memory_mib: int,
    memory: float,
    link: float,
    half: float,
    single: float,
    tf32: float | None = None,
) -> Device:
    """Return a device, given bandwidths in GB/s and rates in TFLOPS. GPUs that support TF32 also
    support bf16.
    """
    peaks: dict[Arithmetic, float] = {"fp32": single * _TERA, "fp16": half * _TERA}
    if tf32 is not None:
        peaks |= {"tf32": tf32 * _TERA, "bf16": half * _TERA}
    return Device(num_sms, memory_mib * _MIB, memory * _GIGA, link * _GIGA, peaks)


# Devices by the name that a user passes.
DEVICES: dict[str, Device] = {
    # SMs, MiB of memory, memory and link bandwidths in GB/s, TFLOPS for fp16, fp32 and TF32
    "v100": _device(80, 16_144, 900, 150, 125, 15.7),
    "v100-32gb": _device(80, 32_480, 900, 150, 125, 15.7),
    "t4": _device(40, 15_360, 320, 16, 65, 8.1),
    "a10": _device(72, 23_028, 600, 32, 125, 31.2, 62.5),
    "a100-40gb": _device(108, 40_960, 1555, 300, 312, 19.5, 156),
    "a100-40gb-pcie": _device(108, 40_960, 1555, 32, 312, 19.5, 156),
    "a100": _device(108, 81_920, 2039, 300, 312, 19.5, 156),
    "a100-pcie": _device(108, 81_920, 1935, 32, 312, 19.5, 156),
    "l4": _device(58, 23_034, 300, 32, 121, 30.3, 60),
    "l40s": _device(142, 46_068, 864, 32, 362, 91.6, 183),
    "h100": _device(132, 81_559, 3350, 450, 989, 67, 494),
    "h100-pcie": _device(114, 81_559, 2000, 64, 756, 51, 378),
    "h100-nvl": _device(132, 95_830, 3900, 300, 835, 60, 417),
    "h200": _device(132, 143_771, 4800, 450, 989, 67, 494),
    "b200": _device(148, 183_359, 8000, 900, 2250, 75, 1100),
}

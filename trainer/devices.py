"""Peak rates, memory and SMs of GPUs, for the MFU of a run and for `kway plan`.

Rates are for dense matrices and come from NVIDIA's data sheets for V100, T4, A10, A100, L4, L40S,
H100, H200 (nvidia.com/data-center/<name>) and HGX B200. The larger numbers in these data sheets are
for structured sparsity. Memory is the size that the driver reports, which is less than the nominal
size. This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]

_MIB = 2**20
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """A GPU model. `names` are the names that torch reports.

    `num_sms` is the number of streaming multiprocessors (SMs), and `capability` is 10 times the
    compute capability. Memory is in bytes, bandwidths are in bytes per second, and peak rates are
    in operations per second. The link bandwidth is the one-way bandwidth between two GPUs in the
    same machine, over NVLink if available and otherwise over PCIe.
    """

    names: tuple[str, ...]
    num_sms: int
    capability: int
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    peaks: dict[Arithmetic, float]

    def peak_flops(self, precision: Precision) -> float | None:
        """Return the peak rate in multiplications and additions per second, or None if the device
        does not support `precision`.

        For fp32, this is the TF32 rate if the device supports TF32, which cuDNN uses for
        convolutions.
        """
        if precision == "fp32":
            return self.peaks.get("tf32", self.peaks["fp32"])
        return self.peaks.get(precision)


def _device(
    names: Sequence[str],
    num_sms: int,
    capability: int,
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
    return Device(
        tuple(names),
        num_sms,
        capability,
        memory_mib * _MIB,
        memory * _GIGA,
        link * _GIGA,
        peaks,
    )


# Devices by the name that a user passes. MIG instances have other names and are not in the table.
DEVICES: dict[str, Device] = {
    # torch's names, SMs, 10 times the compute capability, MiB of memory, memory and link bandwidths
    # in GB/s, TFLOPS for fp16, fp32 and TF32
    "v100": _device(["Tesla V100-SXM2-16GB"], 80, 70, 16_144, 900, 150, 125, 15.7),
    "v100-32gb": _device(
        ["Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"], 80, 70, 32_480, 900, 150, 125, 15.7
    ),
    "t4": _device(["Tesla T4"], 40, 75, 15_360, 320, 16, 65, 8.1),
    "a10": _device(["NVIDIA A10"], 72, 86, 23_028, 600, 32, 125, 31.2, 62.5),
    "a100-40gb": _device(["NVIDIA A100-SXM4-40GB"], 108, 80, 40_960, 1555, 300, 312, 19.5, 156),
    "a100-40gb-pcie": _device(["NVIDIA A100-PCIE-40GB"], 108, 80, 40_960, 1555, 32, 312, 19.5, 156),
    "a100": _device(["NVIDIA A100-SXM4-80GB"], 108, 80, 81_920, 2039, 300, 312, 19.5, 156),
    "a100-pcie": _device(["NVIDIA A100 80GB PCIe"], 108, 80, 81_920, 1935, 32, 312, 19.5, 156),
    "l4": _device(["NVIDIA L4"], 58, 89, 23_034, 300, 32, 121, 30.3, 60),
    "l40s": _device(["NVIDIA L40S"], 142, 89, 46_068, 864, 32, 362, 91.6, 183),
    "h100": _device(["NVIDIA H100 80GB HBM3"], 132, 90, 81_559, 3350, 450, 989, 67, 494),
    "h100-pcie": _device(["NVIDIA H100 PCIe"], 114, 90, 81_559, 2000, 64, 756, 51, 378),
    "h100-nvl": _device(["NVIDIA H100 NVL"], 132, 90, 95_830, 3900, 300, 835, 60, 417),
    "h200": _device(["NVIDIA H200"], 132, 90, 143_771, 4800, 450, 989, 67, 494),
    "b200": _device(["NVIDIA B200"], 148, 100, 183_359, 8000, 900, 2250, 75, 1100),
}


def device_named(name: str) -> Device | None:
    """Return the device that torch calls `name` ("NVIDIA H100 80GB HBM3"), or None if it is not in
    the table.
    """
    return next((device for device in DEVICES.values() if name in device.names), None)

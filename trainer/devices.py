"""What the GPUs that kway is trained on can do at most: for the MFU of a run, and for `kway plan`.

Rates are those of dense matrices, from NVIDIA's data sheets, whose larger numbers count zeros of
structured sparsity: V100, T4, A10, A100, L4, L40S, H100, H200 (nvidia.com/data-center/<name>) and
HGX B200. Memory is what the driver shows, which is less than the name of the card says.
Free of torch.
"""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]

_MIB = 2**20
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """One kind of GPU; `names` are torch's for it.

    Memory in bytes, bandwidths in bytes a second, the link's to another GPU of the same machine
    in one direction (NVLink where there is one, PCIe else); peaks in operations a second.
    """

    names: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    peaks: dict[Arithmetic, float]

    def peak_flops(self, precision: Precision) -> float | None:
        """Multiplications and additions a second; None: the device has no such arithmetic.

        For fp32 it is the TF32 rate if the device has TF32, which cuDNN uses for convolutions.
        """
        if precision == "fp32":
            return self.peaks.get("tf32", self.peaks["fp32"])
        return self.peaks.get(precision)


def _device(
    *names: str,
    memory_mib: int,
    memory: float,
    link: float,
    half: float,
    single: float,
    tf32: float | None = None,
) -> Device:
    """Bandwidths in GB/s, rates in TFLOPS; GPUs with TF32 have bf16, too."""
    peaks: dict[Arithmetic, float] = {"fp32": single * _TERA, "fp16": half * _TERA}
    if tf32 is not None:
        peaks |= {"tf32": tf32 * _TERA, "bf16": half * _TERA}
    return Device(names, memory_mib * _MIB, memory * _GIGA, link * _GIGA, peaks)


# By the name that a person gives. Parts of a GPU (MIG) have other names and are not known.
DEVICES: dict[str, Device] = {
    "v100": _device(
        "Tesla V100-SXM2-16GB",
        memory_mib=16_144,
        memory=900,
        link=150,
        half=125,
        single=15.7,
    ),
    "v100-32gb": _device(
        "Tesla V100-SXM2-32GB",
        "Tesla V100-SXM3-32GB",
        memory_mib=32_480,
        memory=900,
        link=150,
        half=125,
        single=15.7,
    ),
    "t4": _device("Tesla T4", memory_mib=15_360, memory=320, link=16, half=65, single=8.1),
    "a10": _device(
        "NVIDIA A10", memory_mib=23_028, memory=600, link=32, half=125, single=31.2, tf32=62.5
    ),
    "a100-40gb": _device(
        "NVIDIA A100-SXM4-40GB",
        memory_mib=40_960,
        memory=1555,
        link=300,
        half=312,
        single=19.5,
        tf32=156,
    ),
    "a100-40gb-pcie": _device(
        "NVIDIA A100-PCIE-40GB",
        memory_mib=40_960,
        memory=1555,
        link=32,
        half=312,
        single=19.5,
        tf32=156,
    ),
    "a100": _device(
        "NVIDIA A100-SXM4-80GB",
        memory_mib=81_920,
        memory=2039,
        link=300,
        half=312,
        single=19.5,
        tf32=156,
    ),
    "a100-pcie": _device(
        "NVIDIA A100 80GB PCIe",
        memory_mib=81_920,
        memory=1935,
        link=32,
        half=312,
        single=19.5,
        tf32=156,
    ),
    "l4": _device(
        "NVIDIA L4", memory_mib=23_034, memory=300, link=32, half=121, single=30.3, tf32=60
    ),
    "l40s": _device(
        "NVIDIA L40S", memory_mib=46_068, memory=864, link=32, half=362, single=91.6, tf32=183
    ),
    "h100": _device(
        "NVIDIA H100 80GB HBM3",
        memory_mib=81_559,
        memory=3350,
        link=450,
        half=989,
        single=67,
        tf32=494,
    ),
    "h100-pcie": _device(
        "NVIDIA H100 PCIe", memory_mib=81_559, memory=2000, link=64, half=756, single=51, tf32=378
    ),
    "h100-nvl": _device(
        "NVIDIA H100 NVL", memory_mib=95_830, memory=3900, link=300, half=835, single=60, tf32=417
    ),
    "h200": _device(
        "NVIDIA H200", memory_mib=143_771, memory=4800, link=450, half=989, single=67, tf32=494
    ),
    "b200": _device(
        "NVIDIA B200", memory_mib=183_359, memory=8000, link=900, half=2250, single=75, tf32=1100
    ),
}


def device_named(name: str) -> Device | None:
    """The device that torch calls `name` ("NVIDIA H100 80GB HBM3"); None: not in the table."""
    return next((device for device in DEVICES.values() if name in device.names), None)

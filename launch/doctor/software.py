"""Checks of Python, the required packages, torchvision and the environment variables."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from data.extras import EXTRAS, install_command, requirements
from launch.doctor.check import Finding, Workload, error, ok, warning

_SHOWN = ("deepspeed", "transformers", "ray", "webdataset", "safetensors")
_MAX_MESSAGE_LENGTH = 120
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "CUDA_")
_NUM_SHOWN = 6
# Name -> (values that slow down training, their effect).
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the CPU waits for each kernel; use it only for debugging"),
    "NCCL_P2P_DISABLE": (("1",), "the GPUs of a machine exchange data through main memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without peer access exchange data through the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand and RoCE are not used"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank prints many lines; use it only for debugging"),
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        "every collective is checked with an additional collective",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the CPU waits for each collective"),
}


def python(workload: Workload) -> Iterator[Finding]:
    """Report the versions of Python and of the operating system."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def packages(workload: Workload) -> Iterator[Finding]:
    """Check that every required package has a supported version. Also lists missing extras."""
    wanted = requirements()
    if not wanted:
        remedy = "run pip install --editable '.[all]' in kway's checkout"
        yield warning("packages", "kway is not installed, so its requirements are unknown", remedy)
        return
    absent = []
    for extra in EXTRAS:
        needs = requirements(extra)
        missing = [need.name for need in needs if _version(need.name) is None]
        absent += [f"without the extra {extra} ({', '.join(missing)})"] if missing else []
        wanted += [need for need in needs if need.name not in missing]
    wrong = [found for need in wanted if (found := _wrong(need))]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {_version(name)}" for name in _SHOWN if _version(name))
        yield ok("packages", "; ".join([shown, *(absent or ["all extras of kway"])]))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wrong(need: Requirement) -> Finding | None:
    remedy = f"pip install '{need.name}{need.specifier}'"
    found = _version(need.name)
    if found is None:
        return error("packages", f"{need.name} is not installed", remedy)
    if need.specifier.contains(found, prereleases=True):
        return None
    line = f"{need.name} {found} is installed, but kway requires {need.specifier}"
    return error("packages", line, remedy)


def torchvision(workload: Workload) -> Iterator[Finding]:
    """Check that torchvision matches torch, if it is installed.

    kway does not need torchvision, but transformers imports it if it is installed.
    """
    try:
        found = version("torchvision")
    except PackageNotFoundError:
        return
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import torchvision"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        yield ok("torchvision", f"{found} can be imported; kway does not need it")
        return
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:_MAX_MESSAGE_LENGTH]
    yield error(
        "torchvision",
        f"{found} cannot be imported with this torch, which breaks transformers: {reason}",
        "pip uninstall torchvision: kway does not need it",
    )


def jpeg_decoder(workload: Workload) -> Iterator[Finding]:
    """Report the library that decodes JPEGs, and warn if it always decodes whole images."""
    try:
        from data.images.jpeg_crop import decoder, whole_images_notice
    except ImportError as failure:
        yield error("JPEG decoder", f"cannot be imported: {failure}", install_command("data"))
        return
    if (notice := whole_images_notice()) is None:
        yield ok("JPEG decoder", f"{decoder()}, which decodes only the crops for training")
    else:
        remedy = "use Pillow's wheel, a C compiler and Python's headers, and reinstall kway"
        yield warning("JPEG decoder", f"{decoder()}: {notice}", remedy)


def variables(workload: Workload) -> Iterator[Finding]:
    """List the communication variables that are set, and warn if one slows down training."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    slow = []
    for name in names:
        values, effect = _SLOW.get(name, ((), ""))
        if os.environ[name].upper() in values:
            slow.append(name)
            yield warning("variables", f"{name}={os.environ[name]}: {effect}", f"unset {name}")
    rest = [name for name in names if name not in slow]
    more = f" and {len(rest) - _NUM_SHOWN} more" if len(rest) > _NUM_SHOWN else ""
    if rest:
        shown = ", ".join(f"{name}={os.environ[name]}" for name in rest[:_NUM_SHOWN])
        yield ok("variables", f"{shown}{more}")
    elif not slow:
        yield ok("variables", "no variables of NCCL, gloo or torch.distributed are set")

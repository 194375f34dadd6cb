"""Python, the packages that kway requires, whether torchvision matches torch, and environment
variables."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from data.extras import EXTRAS, requirements
from launch.doctor.check import Finding, Workload, error, ok, warning

_SHOWN = ("deepspeed", "transformers", "ray", "webdataset", "safetensors")
_LAST_OF_LONG = 120
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "CUDA_")
_NUM_SHOWN = 6
# Name -> (values that slow training down, their effect).
_HURTFUL = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "each kernel is waited for: for debugging only"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a machine exchange through its memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without peer access exchange through the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand and RoCE are left unused"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank prints much: for debugging only"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the CPU waits in each collective"),
}


def python(workload: Workload) -> Iterator[Finding]:
    """The versions of Python and of the operating system."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def packages(workload: Workload) -> Iterator[Finding]:
    """Every required package has a supported version. Also lists the extras not installed."""
    wanted = requirements()
    if not wanted:
        remedy = "install it: pip install -e '.[all]' in its folder"
        yield warning("packages", "kway is not installed: what it needs is not known", remedy)
        return
    absent = []
    for extra in EXTRAS:
        needs = requirements(extra)
        missing = [need.name for need in needs if _version(need.name) is None]
        absent += [f"without kway[{extra}] ({', '.join(missing)})"] if missing else []
        wanted += [need for need in needs if need.name not in missing]
    wrong = [found for need in wanted if (found := _wrong(need))]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {_version(name)}" for name in _SHOWN if _version(name))
        yield ok("packages", "; ".join([shown, *(absent or ["all that kway needs"])]))


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
    line = f"{need.name} is {found} and kway needs {need.specifier}"
    return error("packages", line, remedy)


def torchvision(workload: Workload) -> Iterator[Finding]:
    """kway does not need torchvision, but transformers imports it if it is installed, so it must
    match torch."""
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
        yield ok("torchvision", f"{found} imports; kway does not need it")
        return
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:_LAST_OF_LONG]
    yield error(
        "torchvision",
        f"{found} does not import beside this torch, and transformers breaks by it: {reason}",
        "pip uninstall torchvision: kway does not need it",
    )


def variables(workload: Workload) -> Iterator[Finding]:
    """The communication variables that are set, and a warning for each that slows training down."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    hurtful = []
    for name in names:
        values, what = _HURTFUL.get(name, ((), ""))
        if os.environ[name].upper() in values:
            hurtful.append(name)
            yield warning("variables", f"{name}={os.environ[name]}: {what}", f"unset {name}")
    rest = [name for name in names if name not in hurtful]
    more = f" and {len(rest) - _NUM_SHOWN} more" if len(rest) > _NUM_SHOWN else ""
    if rest:
        shown = ", ".join(f"{name}={os.environ[name]}" for name in rest[:_NUM_SHOWN])
        yield ok("variables", f"{shown}{more}")
    elif not hurtful:
        yield ok("variables", "none of NCCL's, gloo's or torch.distributed's is set")

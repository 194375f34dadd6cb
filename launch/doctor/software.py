"""Python, the packages that kway stands on, and torchvision, which must not be there half."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from data.extras import EXTRAS, requirements
from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.plans import Plans

_SHOWN = ("deepspeed", "transformers", "ray", "webdataset", "safetensors")
_LAST_OF_LONG = 120


def python(plans: Plans) -> Iterator[Finding]:
    """The interpreter and the system."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def packages(plans: Plans) -> Iterator[Finding]:
    """Every package that kway requires, in a supported version; which extras are not installed."""
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


def torchvision(plans: Plans) -> Iterator[Finding]:
    """kway does without it, but transformers imports it where it is: it has to fit torch."""
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

"""The optional packages of kway, and the commands that install them."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("data", "train", "ray", "serve", "hf", "tensorboard")
# Modules whose names differ from those of their distributions, or a distribution in the same extra.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "grpc": "grpcio",
    "multipart": "python-multipart",
    "huggingface_hub": "transformers",
    "starlette": "fastapi",
}


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of the installed kway, or those that an extra adds.

    Returns [] if kway is not installed.
    """
    try:
        lines = requires("kway") or []
    except PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    if not extra:
        return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [
        one
        for one in found
        if one.marker and one.marker.evaluate({"extra": extra}) and "extra" in str(one.marker)
    ]


def install_command(extra: str) -> str:
    """Return the command that installs an extra.

    It installs from the checkout or file that kway was installed from, or else only the packages of
    the extra. It never asks an index for kway, because another project has that name there.
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", "--editable", f"{checkout}[{extra}]"])
    if (source := _installed_from()) is not None:
        return shlex.join(["pip", "install", f"{source}[{extra}]"])
    packages = sorted(str(one).partition(";")[0] for one in _all(extra))  # without the markers
    return shlex.join(["pip", "install", *packages])


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return a one-line error message if an extra installs the missing module, otherwise None."""
    module = (error.name or "").partition(".")[0]
    needed = canonicalize_name(_DISTRIBUTIONS.get(module, module))
    extras = [
        extra for extra in EXTRAS if needed in {canonicalize_name(one.name) for one in _all(extra)}
    ]
    if not extras:
        return None
    others = f" (also part of the extras {', '.join(extras[1:])})" if extras[1:] else ""
    reason = f"the module {module} is required but not installed"
    return f"{reason}: run {install_command(extras[0])}{others}"


def _installed_from() -> Path | None:
    """Return the folder or the wheel that kway was installed from, if it still exists."""
    try:
        text = distribution("kway").read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"] if text else "")
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else None


def _all(extra: str) -> list[Requirement]:
    """Return the requirements of an extra and of the extras that it includes."""
    found = requirements(extra)
    others = [name for one in found if one.name == "kway" for name in sorted(one.extras)]
    included = [one for name in others for one in _all(name)]
    return [*(one for one in found if one.name != "kway"), *included]

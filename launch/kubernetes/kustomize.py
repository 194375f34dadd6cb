"""Builds kustomizations of `k8s/` with the settings that all manifests share, such as the image."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.option import Option

# k8s/ is next to the packages both in a checkout and in an installation.
FOLDER = Path(__file__).parents[2] / "k8s"
GPU = "nvidia.com/gpu"
CLAIM = "persistentVolumeClaim"
_BUILD_SECONDS = 60
# The name of an object or host.
DnsName = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"), Option(metavar="NAME")
]

# The C parser, which PyYAML's wheels include, is ten times as fast as the Python parser.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Settings:
    """Settings of any overlay. The fields define options of `kway k8s render`."""

    image: Annotated[str | None, Option(metavar="NAME:TAG")] = Field(
        default=None,
        description="container image; default: the overlay's image, or its CUDA variant for GPUs",
    )
    storage_class: DnsName | None = Field(
        default=None,
        description="storage class of the claims, a lowercase name; default: the cluster's default",
    )
    has_claims: Annotated[bool, Option("--claims/--no-claims")] = Field(
        default=True, description="also print the PersistentVolumeClaims"
    )


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a temporary folder with a copy of `k8s/`.

    kustomize does not accept absolute paths as resources.
    """
    with TemporaryDirectory(prefix="kway-k8s-") as name:
        shutil.copytree(FOLDER, Path(name) / "k8s")
        yield Path(name)


def build_with(
    settings: Settings, folder: Path, tree: Mapping[str, Any], *, needs_cuda: bool
) -> str:
    """Return the YAML of the kustomization `tree` in `folder`, with the settings added to it."""
    patches = list(tree.get("patches", ()))
    if settings.storage_class is not None:
        values = {"/spec/storageClassName": settings.storage_class}
        patches.append(json_patch("PersistentVolumeClaim", values))
    if not settings.has_claims:
        patches.append(removed_claims())
    whole = {**tree, "patches": patches}
    if settings.image is not None:
        found = re.fullmatch(r"(.*?)(?::([\w.-]+))?(?:@(.+))?", settings.image)
        if found is None or not (found[2] or found[3]):
            fix = "pass NAME:TAG or NAME@sha256:DIGEST"
            raise ValueError(f"--image {settings.image} has no fixed tag: {fix}")
        version = {"digest": found[3]} if found[3] else {"newTag": found[2]}
        whole["images"] = [{"name": "kway", "newName": found[1], **version}]
    elif needs_cuda:
        whole["components"] = [*tree.get("components", ()), "k8s/components/cu130"]
    write(folder, whole)
    return build(folder)


def json_patch(
    kind: str, values: Mapping[str, Any], more: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the patch of a kustomization that sets the values at these JSON pointers, and then
    applies more JSON patch operations, in all objects of a kind."""
    operations = [{"op": "add", "path": path, "value": value} for path, value in values.items()]
    return {"target": {"kind": kind}, "patch": yaml.safe_dump([*operations, *more])}


def removed_claims(name: str = ".*") -> dict[str, Any]:
    """Return the patch that removes the PersistentVolumeClaims with this name."""
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "any"}}
    return {
        "target": {"kind": "PersistentVolumeClaim", "name": name},
        "patch": yaml.safe_dump({**kind, "$patch": "delete"}),
    }


def write(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the `kustomization.yaml` of a folder."""
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = yaml.safe_dump({**head, **tree}, sort_keys=False)
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")


def kustomize_command() -> list[str]:
    """Return the command that builds a kustomization. Raises FileNotFoundError without kubectl."""
    if (path := shutil.which("kubectl")) is None:
        raise FileNotFoundError("kubectl is not on PATH: install kubectl 1.27 or newer")
    return [path, "kustomize"]


def build(folder: Path) -> str:
    """Return the YAML that a kustomization builds. Raises ValueError with kustomize's error."""
    command = [*kustomize_command(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"kustomize cannot build {folder.name}: {reason}")
    return done.stdout

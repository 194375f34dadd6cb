"""Builds kustomizations of `k8s/` with the settings that all manifests share, such as the image."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from launch.kubernetes.objects import load

# k8s/ is next to the packages both in a checkout and in an installation.
FOLDER = Path(__file__).parents[2] / "k8s"
_BUILD_SECONDS = 60

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CLASS = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Claims:
    """Options for the claims.

    storage_class: overrides the cluster's default. printed: False to omit the claims, for example
    because they already exist.
    """

    storage_class: str | None = None
    printed: bool = True


ALL_CLAIMS = Claims()


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a temporary folder with a copy of `k8s/`.

    kustomize does not accept absolute paths as resources.
    """
    with TemporaryDirectory(prefix="kway-k8s-") as name:
        shutil.copytree(FOLDER, Path(name) / "k8s")
        yield Path(name)


def render_tree(
    folder: Path,
    tree: Mapping[str, Any],
    *,
    needs_cuda: bool,
    image: str | None,
    namespace: str | None,
    claims: Claims,
) -> str:
    """Return the YAML of a kustomization in `folder`, with these settings added to `tree`.

    `image` defaults to the image of the manifests, or to its CUDA variant if `needs_cuda`.
    """
    whole = dict(tree)
    if image is not None:
        whole["images"] = [{"name": "kway", **_image(image)}]
    elif needs_cuda:
        whole["components"] = [*tree.get("components", ()), "k8s/components/cu130"]
    if namespace is not None:
        whole["namespace"] = checked_name("--namespace", namespace)
    whole["patches"] = [*tree.get("patches", ()), *_stored(claims)]
    write(folder, whole)
    text = build(folder)
    return text if claims.printed else _without_claims(text)


def _stored(claims: Claims) -> list[dict[str, Any]]:
    """Return a kustomize patch that sets the storage class of every claim."""
    if (name := claims.storage_class) is None:
        return []
    if not _CLASS.fullmatch(name):
        raise ValueError(f"--storage-class {name} is not a valid name: use only a-z, 0-9, - and .")
    patch = [{"op": "add", "path": "/spec/storageClassName", "value": name}]
    return [json_patch("PersistentVolumeClaim", patch)]


def _without_claims(text: str) -> str:
    documents = re.split(r"^---\n", text, flags=re.MULTILINE)
    remaining = [each for each in documents if load(each)["kind"] != "PersistentVolumeClaim"]
    return "---\n".join(remaining)


def _image(text: str) -> dict[str, str]:
    if (found := _IMAGE.fullmatch(text)) is None:
        raise ValueError(
            f"--image {text} is not a valid image: pass NAME:TAG or NAME@sha256:DIGEST without "
            "https://, with only a-z, 0-9, ., _, - and / in NAME"
        )
    parts = found.groupdict()
    if not parts["tag"] and not parts["digest"]:
        raise ValueError(f"--image {text} has no fixed tag: pass NAME:TAG or NAME@sha256:DIGEST")
    named = {"newName": parts["name"], "newTag": parts["tag"], "digest": parts["digest"]}
    if named["digest"]:
        del named["newTag"]
    return {key: value for key, value in named.items() if value}


def checked_name(option: str, name: str) -> str:
    """Return the name of an object. Raises ValueError if it is not a DNS label."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{option} {name} is not a valid name: use at most 63 characters, only a-z, 0-9 and -"
        )
    return name


def json_patch(kind: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the patch of a kustomization that applies JSON patch operations to all objects of a
    kind."""
    return {"target": {"kind": kind}, "patch": yaml.safe_dump(operations)}


def write(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the `kustomization.yaml` of a folder."""
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = yaml.safe_dump({**head, **tree}, sort_keys=False)
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")


def kustomize_command() -> list[str]:
    """Return the command that builds a kustomization.

    Raises FileNotFoundError if neither kustomize nor kubectl is installed.
    """
    if (path := shutil.which("kustomize")) is not None:
        return [path, "build"]
    if (path := shutil.which("kubectl")) is not None:
        return [path, "kustomize"]
    raise FileNotFoundError(
        "neither kubectl nor kustomize is on PATH: install kubectl 1.27 or newer, which includes "
        "kustomize (https://kubernetes.io/docs/tasks/tools)"
    )


def build(folder: Path) -> str:
    """Return the YAML that a kustomization builds. Raises ValueError with kustomize's error."""
    command = [*kustomize_command(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"kustomize cannot build {folder.name}: {reason}")
    return done.stdout

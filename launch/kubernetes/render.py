"""Renders the manifests of a training run for a given recipe and given numbers of pods and GPUs.

kustomize builds the overlay unchanged. A kustomization between the overlay and base/training sets
the recipe and the numbers of pods and ranks. Another one on top of the overlay sets the image, the
namespace and the storage class.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from launch.kubernetes.agreement import check_agreement, on_devices
from launch.kubernetes.checks import problems
from launch.kubernetes.objects import GPU, load, load_all, multiply
from trainer.config import Recipe
from trainer.recipe import dump_recipe

# k8s/ is next to the packages both in a checkout and in an installation.
FOLDER = Path(__file__).parents[2] / "k8s"
OVERLAYS = FOLDER / "overlays"
_BUILD_SECONDS = 60

# backoffLimit per pod: losing pod 0 makes every other pod fail once.
_ATTEMPTS = 4
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


@dataclass(frozen=True)
class Size:
    """The number of pods, and of GPUs per pod. A pod has one rank per GPU, or one CPU rank."""

    nodes: int
    gpus: int

    @property
    def ranks(self) -> int:
        """Number of ranks per pod."""
        return max(1, self.gpus)


def overlays() -> list[str]:
    """Return the valid values of --overlay."""
    return sorted(path.parent.name for path in OVERLAYS.glob("*/kustomization.yaml"))


def render(
    recipe: Recipe,
    size: Size,
    *,
    overlay: str,
    image: str | None = None,
    namespace: str | None = None,
    claims: Claims = Claims(),
) -> str:
    """Render the overlay for this recipe and size as YAML, and check the result.

    `image` defaults to the overlay's image, or to its CUDA variant if pods have GPUs. Raises
    ValueError for inconsistent input and FileNotFoundError if kustomize is not installed.
    """
    if overlay not in overlays():
        raise ValueError(f"--overlay {overlay} is unknown: choose one of {', '.join(overlays())}")
    recipe = on_devices(recipe, gpus=size.gpus)
    with TemporaryDirectory(prefix="kway-k8s-") as name:
        folder = Path(name)
        # kustomize does not accept absolute paths as resources.
        shutil.copytree(FOLDER, folder / "k8s")
        _size_the_base(folder / "k8s" / "base", recipe, size)
        top: dict[str, Any] = {"resources": [f"k8s/overlays/{overlay}"], **_stored(claims)}
        if image is not None:
            top["images"] = [{"name": "kway", **_image(image)}]
        elif size.gpus:
            top["components"] = ["k8s/components/cu130"]
        _write(folder, top if namespace is None else {**top, "namespace": _checked(namespace)})
        text = build(folder)
    manifests = load_all(text)
    check_agreement(manifests, recipe, nodes=size.nodes, gpus=size.gpus, overlay=overlay)
    if found := problems(manifests):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"overlay {overlay}: {found[0]}{more}")
    return text if claims.printed else _without_claims(text)


def _stored(claims: Claims) -> dict[str, Any]:
    """Return a kustomize patch that sets the storage class of every claim."""
    if (name := claims.storage_class) is None:
        return {}
    if not _CLASS.fullmatch(name):
        raise ValueError(f"--storage-class {name} is not a valid name: use only a-z, 0-9, - and .")
    patch = [{"op": "add", "path": "/spec/storageClassName", "value": name}]
    target = {"kind": "PersistentVolumeClaim"}
    return {"patches": [{"target": target, "patch": yaml.safe_dump(patch)}]}


def _without_claims(text: str) -> str:
    documents = re.split(r"^---\n", text, flags=re.MULTILINE)
    remaining = [each for each in documents if load(each)["kind"] != "PersistentVolumeClaim"]
    return "---\n".join(remaining)


def _size_the_base(base: Path, recipe: Recipe, size: Size) -> None:
    """Wrap base/training in a kustomization that all overlays then build on."""
    (base / "training").rename(base / "training-as-shipped")
    training = base / "training"
    training.mkdir()
    (training / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    recipes = [{"name": "recipe", "behavior": "replace", "files": ["recipe.yaml"]}]
    tree: dict[str, Any] = {
        "resources": ["../training-as-shipped"],
        "configMapGenerator": recipes,
        "patches": [{"patch": yaml.safe_dump(_job(size, base / "training-as-shipped/job.yaml"))}],
    }
    _write(training, tree)


def _job(size: Size, shipped: Path) -> dict[str, Any]:
    """Return a patch that scales the Job of base/training, which has one rank per pod."""
    pod = load(shipped.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    variables = {"NUM_NODES": size.nodes, "NUM_RANKS": size.ranks}
    container: dict[str, Any] = {
        "name": "train",
        "env": [{"name": name, "value": str(value)} for name, value in variables.items()],
    }
    gpus = {GPU: str(size.gpus)} if size.gpus else {}
    container["resources"] = {
        kind: {**{name: multiply(amount, size.ranks) for name, amount in amounts.items()}, **gpus}
        for kind, amounts in pod["containers"][0]["resources"].items()
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "kway"},
        "spec": {
            "completions": size.nodes,
            "parallelism": size.nodes,
            "backoffLimit": _ATTEMPTS * size.nodes,
            "template": {"spec": {"containers": [container], "volumes": _memory(pod, size)}},
        },
    }


def _memory(pod: dict[str, Any], size: Size) -> list[dict[str, Any]]:
    """Return the pod's memory volumes, scaled to the number of ranks."""
    return [
        {
            "name": volume["name"],
            "emptyDir": {"sizeLimit": multiply(folder["sizeLimit"], size.ranks)},
        }
        for volume in pod["volumes"]
        if (folder := volume.get("emptyDir", {})).get("medium") == "Memory"
    ]


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


def _checked(namespace: str) -> str:
    if not _NAME.fullmatch(namespace):
        raise ValueError(
            f"--namespace {namespace} is not a valid name: use at most 63 characters, only a-z, "
            "0-9 and -"
        )
    return namespace


def _write(folder: Path, tree: dict[str, Any]) -> None:
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

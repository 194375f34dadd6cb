"""Manifests of a training run for a recipe and a size.

The overlay is built by kustomize as it stands; in between it and base/training comes a
kustomization that puts in the recipe, the number of pods and ranks, and the image.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from launch.kubernetes.agreement import check_agreement
from launch.kubernetes.checks import problems
from launch.kubernetes.kustomize import FOLDER, OVERLAYS, build
from trainer.config import Recipe
from trainer.recipe import dump_recipe

# Losing pod 0 makes every other pod fail once.
_TRIES = 4
_GPU = "nvidia.com/gpu"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_IMAGE = re.compile(
    r"(?P<name>[^@\s]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Size:
    """`nodes` pods of `gpus` GPUs and as many ranks each; 0 GPUs: one rank on CPUs."""

    nodes: int
    gpus: int

    @property
    def ranks(self) -> int:
        """Of one pod."""
        return max(1, self.gpus)


def overlays() -> list[str]:
    """The names that --overlay takes."""
    return sorted(path.parent.name for path in OVERLAYS.glob("*/kustomization.yaml"))


def render(
    recipe: Recipe,
    size: Size,
    *,
    overlay: str,
    image: str | None = None,
    namespace: str | None = None,
) -> str:
    """The overlay's manifests for this recipe and size as YAML, checked.

    Raises ValueError for what does not fit together and FileNotFoundError without kustomize.
    """
    if overlay not in overlays():
        raise ValueError(f"--overlay {overlay} is not known: choose one of {', '.join(overlays())}")
    with TemporaryDirectory(prefix="kway-k8s-") as name:
        folder = Path(name)
        # kustomize takes no folder by an absolute path.
        shutil.copytree(FOLDER, folder / "k8s")
        _size_the_base(folder / "k8s" / "base", recipe, size, image)
        top: dict[str, Any] = {"resources": [f"k8s/overlays/{overlay}"]}
        _write(folder, top if namespace is None else {**top, "namespace": _checked(namespace)})
        text = build(folder)
    manifests = list(yaml.safe_load_all(text))
    check_agreement(manifests, recipe, nodes=size.nodes, ranks=size.ranks, overlay=overlay)
    if found := problems(manifests):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"overlay {overlay}: {found[0]}{more}")
    return text


def _size_the_base(base: Path, recipe: Recipe, size: Size, image: str | None) -> None:
    """Lay ours over base/training, in its place, so that every overlay stands on it."""
    (base / "training").rename(base / "training-as-shipped")
    training = base / "training"
    training.mkdir()
    (training / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    recipes = [{"name": "recipe", "behavior": "replace", "files": ["recipe.yaml"]}]
    tree: dict[str, Any] = {
        "resources": ["../training-as-shipped"],
        "configMapGenerator": recipes,
        "patches": [{"patch": yaml.safe_dump(_job(size))}],
    }
    if image is not None:
        tree["images"] = [{"name": "kway", **_image(image)}]
    _write(training, tree)


def _job(size: Size) -> dict[str, Any]:
    """A patch of the Job of base/training."""
    variables = {"NUM_NODES": size.nodes, "NUM_RANKS": size.ranks}
    container: dict[str, Any] = {
        "name": "train",
        "env": [{"name": name, "value": str(value)} for name, value in variables.items()],
    }
    if size.gpus:
        gpus = {_GPU: str(size.gpus)}
        container["resources"] = {"requests": gpus, "limits": gpus}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "kway"},
        "spec": {
            "completions": size.nodes,
            "parallelism": size.nodes,
            "backoffLimit": _TRIES * size.nodes,
            "template": {"spec": {"containers": [container]}},
        },
    }


def _image(text: str) -> dict[str, str]:
    found = _IMAGE.fullmatch(text)
    parts = {} if found is None else found.groupdict()
    if not parts.get("tag") and not parts.get("digest"):
        raise ValueError(f"--image {text} has no fixed tag: give NAME:TAG or NAME@sha256:DIGEST")
    named = {"newName": parts["name"], "newTag": parts["tag"], "digest": parts["digest"]}
    if named["digest"]:
        del named["newTag"]
    return {key: value for key, value in named.items() if value}


def _checked(namespace: str) -> str:
    if not _NAME.fullmatch(namespace):
        raise ValueError(f"--namespace {namespace} is no name: give a-z, 0-9 and -, at most 63")
    return namespace


def _write(folder: Path, tree: dict[str, Any]) -> None:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = yaml.safe_dump({**head, **tree}, sort_keys=False)
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")

"""Renders the manifests of a training run for a given recipe and given numbers of pods and GPUs.

kustomize builds the overlay unchanged. A kustomization between the overlay and base/training sets
the recipe and the numbers of pods and ranks. Another one on top of the overlay sets the image, the
namespace and the storage class.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.kubernetes.agreement import check_agreement, on_devices
from launch.kubernetes.kustomize import (
    ALL_CLAIMS,
    FOLDER,
    Claims,
    copied,
    render_tree,
    write,
)
from launch.kubernetes.objects import GPU, load, load_all, multiply
from trainer.config import Recipe
from trainer.recipe import dump_recipe

OVERLAYS = FOLDER / "overlays"

# backoffLimit per pod: losing pod 0 makes every other pod fail once.
_ATTEMPTS = 4


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
    claims: Claims = ALL_CLAIMS,
) -> str:
    """Render the overlay for this recipe and size as YAML, and check the result.

    `image` defaults to the overlay's image, or to its CUDA variant if pods have GPUs. Raises
    ValueError for inconsistent input and FileNotFoundError if kustomize is not installed.
    """
    if overlay not in overlays():
        raise ValueError(f"--overlay {overlay} is unknown: choose one of {', '.join(overlays())}")
    recipe = on_devices(recipe, gpus=size.gpus)
    with copied() as folder:
        _size_the_base(folder / "k8s" / "base", recipe, size)
        text = render_tree(
            folder,
            {"resources": [f"k8s/overlays/{overlay}"]},
            needs_cuda=size.gpus > 0,
            image=image,
            namespace=namespace,
            claims=claims,
        )
    check_agreement(load_all(text), recipe, nodes=size.nodes, gpus=size.gpus, overlay=overlay)
    return text


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
    write(training, tree)


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

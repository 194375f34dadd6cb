"""Renders the manifests of a training run for a given recipe and given numbers of pods and GPUs.

kustomize builds the overlay unchanged. A kustomization between the overlay and base/training sets
the recipe and the numbers of pods and ranks. Another one on top of the overlay sets the image, the
namespace and the claims.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from launch.kubernetes.agreement import check_fit, check_pods
from launch.kubernetes.kustomize import (
    FOLDER,
    GPU,
    YAML_LOADER,
    Settings,
    build_with,
    copied,
    write,
)
from trainer.config import Recipe
from trainer.recipe import dump_recipe

# backoffLimit per pod: losing pod 0 makes every other pod fail once.
_ATTEMPTS = 4


def render(recipe: Recipe, settings: Settings, *, nodes: int, gpus: int, overlay: str) -> str:
    """Render the overlay for this recipe, number of pods, and number of GPUs per pod as YAML.

    A pod has one rank per GPU, or one CPU rank. Raises ValueError for inconsistent input and
    FileNotFoundError if kustomize is not installed.
    """
    known = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
    if overlay not in known:
        raise ValueError(f"--overlay {overlay} is unknown: choose one of {', '.join(known)}")
    check_fit(recipe, nodes=nodes, gpus=gpus)
    if gpus:
        # A pod whose image cannot use its GPUs then fails at startup, whereas with `auto` it would
        # train on CPUs.
        train = recipe.train.model_copy(update={"device": "cuda"})
        recipe = recipe.model_copy(update={"train": train})
    with copied() as folder:
        _size_the_base(folder / "k8s" / "base", recipe, nodes, gpus)
        tree = {"resources": [f"k8s/overlays/{overlay}"]}
        text = build_with(settings, folder, tree, needs_cuda=gpus > 0)
    check_pods(text, recipe, nodes=nodes, gpus=gpus, overlay=overlay)
    return text


def _size_the_base(base: Path, recipe: Recipe, nodes: int, gpus: int) -> None:
    """Wrap base/training in a kustomization that all overlays then build on."""
    shipped, training = base / "training-as-shipped", base / "training"
    training.rename(shipped)
    training.mkdir()
    (training / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    recipes = [{"name": "recipe", "behavior": "replace", "files": ["recipe.yaml"]}]
    tree: dict[str, Any] = {
        "resources": ["../training-as-shipped"],
        "configMapGenerator": recipes,
        "patches": [{"patch": yaml.safe_dump(_job(shipped / "job.yaml", nodes, gpus))}],
    }
    write(training, tree)


def _job(shipped: Path, nodes: int, gpus: int) -> dict[str, Any]:
    """Return a patch that scales the Job of base/training, which has one rank per pod."""
    pod = yaml.load(shipped.read_bytes(), YAML_LOADER)["spec"]["template"]["spec"]
    ranks = max(1, gpus)
    devices = {GPU: str(gpus)} if gpus else {}
    container = {
        "name": "train",
        "env": [
            {"name": "NUM_NODES", "value": str(nodes)},
            {"name": "NUM_RANKS", "value": str(ranks)},
        ],
        "resources": {
            kind: {**{name: _times(amount, ranks) for name, amount in each.items()}, **devices}
            for kind, each in pod["containers"][0]["resources"].items()
        },
    }
    memory = [
        {"name": volume["name"], "emptyDir": {"sizeLimit": _times(folder["sizeLimit"], ranks)}}
        for volume in pod["volumes"]
        if (folder := volume.get("emptyDir", {})).get("medium") == "Memory"
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "kway"},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": _ATTEMPTS * nodes,
            "template": {"spec": {"containers": [container], "volumes": memory}},
        },
    }


def _times(amount: str, factor: int) -> str:
    """Multiply a quantity: `8Gi` x 4 -> `32Gi`."""
    return re.sub(r"^\d+", lambda number: str(int(number[0]) * factor), amount)

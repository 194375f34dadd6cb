"""Renders the manifests of a training run for a given recipe and given numbers of pods and GPUs.

kustomize builds the overlay unchanged. A kustomization between the overlay and base/training sets
the recipe and the numbers of pods and ranks. Another one on top of the overlay sets the image and
the claims. Only kway knows whether a recipe fits the ranks and the volumes of its
pods, so both are checked.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel

from data.config import StreamConfig
from data.remote.config import is_url
from launch.kubernetes.kustomize import (
    CLAIM,
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
    FileNotFoundError if kubectl is not installed.
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


def check_fit(recipe: Recipe, *, nodes: int, gpus: int) -> None:
    """Raise ValueError if nodes x ranks does not fit the recipe's groups of ranks or its batch, or
    if its device contradicts the number of GPUs."""
    from trainer.world import group_ranks  # imports torch

    local, device = max(1, gpus), recipe.train.device
    num = nodes * local
    group_ranks(recipe.train.class_group, key="train.class_group", size=num, local_size=local)
    recipe.train.strategy.shard_ranks(num, local)
    if recipe.train.global_batch < num:
        raise ValueError(
            f"train.global_batch is {recipe.train.global_batch}, less than one sample for each of "
            f"the {num} ranks: raise it, or use fewer ranks"
        )
    if device in ("cpu", "cuda") and (device == "cuda") != (gpus > 0):
        raise ValueError(
            f"train.device is {device}, but --gpus is {gpus}: pass --gpus 0 for the device "
            "cpu, and the number of GPUs per pod for cuda"
        )


def check_pods(text: str, recipe: Recipe, *, nodes: int, gpus: int, overlay: str) -> None:
    """Raise ValueError if the overlay is written for another size, or if a path in the recipe is
    not on a volume of its pods."""
    found = [each for tree in yaml.load_all(text, YAML_LOADER) for each in _training_pods(tree)]
    if not found:
        raise ValueError(f"overlay {overlay} has no training job: apply it with kubectl apply -k")
    for pod, container in found:
        variables = {each["name"]: each.get("value") for each in container["env"]}
        actual = {
            "--nodes": (nodes, variables["NUM_NODES"]),
            "--gpus (ranks per pod)": (max(1, gpus), variables["NUM_RANKS"]),
            "--gpus": (gpus, container["resources"]["limits"].get(GPU, 0)),
        }
        for name, (requested, number) in actual.items():
            if str(requested) != str(number):
                raise ValueError(
                    f"{name} is {requested}, but overlay {overlay} is written for {number}: "
                    f"pass {number}, or choose another overlay"
                )
        _check_files(recipe, pod, container, str(variables["HOME"]), overlay)


def _training_pods(tree: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the pods inside an object that run `kway train`, each with its container."""
    if isinstance(tree, dict):
        for container in tree.get("containers", ()):
            if "kway train" in " ".join(container.get("command", ())):
                yield tree, container
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for branch in branches:
        yield from _training_pods(branch)


def _check_files(
    recipe: Recipe, pod: dict[str, Any], container: dict[str, Any], home: str, overlay: str
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [(each, volumes[each["name"]]) for each in container["volumeMounts"]]
    # Inputs must be on claims: an emptyDir starts empty, and Secrets do not contain data.
    claims = {each["mountPath"] for each, volume in mounts if CLAIM in volume}
    writable = {
        each["mountPath"]
        for each, volume in mounts
        if not each.get("readOnly") and not volume.get(CLAIM, {}).get("readOnly")
    }
    scratch = {each["mountPath"] for each, volume in mounts if "emptyDir" in volume}
    allowed = {
        "run": ("writable claim", writable & claims),
        "data.cache.folder": ("writable volume", writable & (claims | scratch)),
    }
    for key, path in _files(recipe, ""):
        what, folders = allowed.get(key, ("claim", claims))
        inside = f"{home}{path[1:]}" if path.startswith("~/") else path
        resolved = str(PurePosixPath(container["workingDir"]) / inside)
        normal = PurePosixPath(posixpath.normpath(resolved))
        if not any(normal.is_relative_to(folder) for folder in folders):
            raise ValueError(
                f"{key} is {path} ({resolved} in the pods of overlay {overlay}), but no {what} "
                f"is mounted there: choose a folder below {', '.join(sorted(folders))}"
            )


def _files(tree: BaseModel, above: str) -> Iterator[tuple[str, str]]:
    """Yield the key and path of every file and folder in the recipe."""
    if isinstance(tree, StreamConfig):
        folders = {str(PurePosixPath(tar).parent) for tar in tree.addresses if not is_url(tar)}
        yield from ((f"{above}shards", folder) for folder in sorted(folders))
    for name, value in tree:
        several = enumerate(value) if isinstance(value, tuple) else ()
        for key, one in ((name, value), *((f"{name}.{number}", one) for number, one in several)):
            if isinstance(one, BaseModel):
                yield from _files(one, f"{above}{key}.")
        if isinstance(value, Path):
            yield f"{above}{name}", str(value)

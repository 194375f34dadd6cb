"""Checks that the recipe and the numbers of pods and ranks agree with the manifests."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from pydantic import BaseModel

from data.config import StreamConfig
from launch.kubernetes.objects import (
    CLAIM,
    GPU,
    Job,
    Manifest,
    at,
    environment,
    is_below,
    jobs,
    mount_paths,
    option,
    words,
    writable_mounts,
)
from trainer.config import Recipe

_URL = "://"
_CACHE = "data.cache.folder"


def check_fit(recipe: Recipe, *, nodes: int, ranks: int) -> None:
    """Raise ValueError if nodes x ranks does not fit the recipe's groups of ranks or its batch."""
    from trainer.world import mesh_shape  # imports torch

    mesh_shape(recipe.train.class_group, size=nodes * ranks, local_size=ranks)
    recipe.train.strategy.shard_ranks(nodes * ranks, ranks)
    if recipe.train.global_batch < nodes * ranks:
        raise ValueError(
            f"train.global_batch is {recipe.train.global_batch}, less than one sample for each of "
            f"the {nodes * ranks} ranks: raise it, or use fewer ranks"
        )


def on_devices(recipe: Recipe, *, gpus: int) -> Recipe:
    """Set `train.device` to cuda if the pods reserve GPUs.

    A pod whose image cannot use its GPUs then fails at startup, whereas with `auto` it would train
    on CPUs. Raises ValueError if `train.device` contradicts `gpus`.
    """
    device = recipe.train.device
    if gpus and device == "cpu":
        raise ValueError(
            f"train.device is cpu, but --gpus is {gpus}, so the pods would reserve GPUs without "
            "using them: pass --gpus 0, or train.device=cuda"
        )
    if not gpus and device == "cuda":
        raise ValueError(
            "train.device is cuda, but --gpus is 0: pass the number of GPUs per pod, or "
            "train.device=cpu"
        )
    if not gpus:
        return recipe
    train = recipe.train.model_copy(update={"device": "cuda"})
    return recipe.model_copy(update={"train": train})


def check_agreement(
    manifests: Sequence[Manifest], recipe: Recipe, *, nodes: int, gpus: int, overlay: str
) -> None:
    """Raise ValueError if the manifests start a different number of pods or ranks than requested,
    or if a path in the recipe is not on one of the mounted volumes."""
    found = [job for job in jobs(manifests) if job.trainer is not None]
    if not found:
        raise ValueError(
            f"overlay {overlay} has no training job: apply it with kubectl apply -k, or choose "
            "another overlay"
        )
    for job in found:
        requested = {"--nodes": nodes, "--gpus (ranks per pod)": max(1, gpus), "--gpus": gpus}
        actual = _size(job)
        for name, number in requested.items():
            if str(actual[name]) != str(number):
                raise ValueError(
                    f"{name} is {number}, but overlay {overlay} is written for {actual[name]}: "
                    f"pass {actual[name]}, or choose another overlay"
                )
        _check_files(job, recipe, overlay)


def _size(job: Job) -> dict[str, object]:
    trainer = job.trainer or {}
    return {
        "--nodes": job.num_pods,
        "--gpus (ranks per pod)": option(words(trainer, job.given), "--nproc"),
        "--gpus": at(trainer, "resources", "limits").get(GPU, 0),
    }


def _check_files(job: Job, recipe: Recipe, overlay: str) -> None:
    trainer = job.trainer or {}
    folder = PurePosixPath(trainer.get("workingDir", "/"))
    home = environment(trainer).get("HOME", "/")
    # Inputs must be on claims: an emptyDir starts empty, and Secrets do not contain data.
    reading = ("claim", mount_paths(job.pod, trainer, (CLAIM,)))
    writing = {
        "run": ("writable claim", writable_mounts(job.pod, trainer, (CLAIM,))),
        _CACHE: ("writable volume", writable_mounts(job.pod, trainer, (CLAIM, "emptyDir"))),
    }
    for key, path in _files(recipe, ""):
        if key == _CACHE and not _is_fetched(recipe):
            continue
        what, allowed = writing.get(key, reading)
        resolved = str(folder / (f"{home}{path[1:]}" if path.startswith("~/") else path))
        if not is_below(resolved, allowed):
            raise ValueError(
                f"{key} is {path} ({resolved} in the pods of overlay {overlay}), but no {what} "
                f"is mounted there: choose a folder below {', '.join(sorted(allowed))}"
            )


def _is_fetched(recipe: Recipe) -> bool:
    """Return whether the recipe reads remote data and therefore uses the cache."""
    tars = () if recipe.data.stream is None else recipe.data.stream.addresses
    folders = [recipe.data.shards, *(one.shards for one in recipe.data.mixture)]
    return not all(isinstance(f, Path) for f in folders) or any(_URL in tar for tar in tars)


def _files(tree: BaseModel, above: str) -> Iterator[tuple[str, str]]:
    """Yield the key and path of every file and folder in the recipe."""
    if isinstance(tree, StreamConfig):
        folders = {str(PurePosixPath(tar).parent) for tar in tree.addresses if _URL not in tar}
        yield from ((f"{above}shards", folder) for folder in sorted(folders))
    for name, value in tree:
        if isinstance(value, BaseModel):
            yield from _files(value, f"{above}{name}.")
        elif isinstance(value, tuple):
            for number, one in enumerate(value):
                if isinstance(one, BaseModel):
                    yield from _files(one, f"{above}{name}.{number}.")
        elif isinstance(value, Path):
            yield f"{above}{name}", str(value)

"""Whether a recipe, a number of pods and ranks, and the manifests made of them agree."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from pydantic import BaseModel

from launch.kubernetes.objects import Job, Manifest, jobs, option, trains, words
from launch.kubernetes.pod_rules import is_below
from trainer.config import Recipe


def check_fit(recipe: Recipe, *, nodes: int, ranks: int) -> None:
    """ValueError where the mesh `data` x `class` or the batch does not fit nodes x ranks."""
    from trainer.world import mesh_shape  # brings torch

    mesh_shape(recipe.train.class_group, size=nodes * ranks, local_size=ranks)
    if recipe.train.global_batch < nodes * ranks:
        raise ValueError(
            f"train.global_batch is {recipe.train.global_batch} and there are {nodes * ranks} "
            "ranks: some have no rows; raise it or take fewer"
        )


def check_agreement(
    manifests: Sequence[Manifest], recipe: Recipe, *, nodes: int, ranks: int, overlay: str
) -> None:
    """ValueError where the manifests start other pods or ranks than asked for, or where the
    recipe's files lie on no volume of theirs."""
    found = [job for job in jobs(manifests) if _trainer(job) is not None]
    if not found:
        raise ValueError(f"overlay {overlay} trains nothing: apply it by kubectl apply -k")
    for job in found:
        line = words(_trainer(job) or {}, job.given)
        asked = {"--nodes": nodes, "--gpus (ranks a pod)": ranks}
        there = {"--nodes": job.num_pods, "--gpus (ranks a pod)": option(line, "--nproc")}
        for name, number in asked.items():
            if str(there[name]) != str(number):
                raise ValueError(
                    f"{name} is {number} and overlay {overlay} is made for {there[name]}: give "
                    "that, or choose another overlay"
                )
        _check_files(job, recipe, overlay)


def _trainer(job: Job) -> Manifest | None:
    return next((c for c in job.pod.containers if trains(c)), None)


def _check_files(job: Job, recipe: Recipe, overlay: str) -> None:
    trainer = _trainer(job) or {}
    folder = PurePosixPath(trainer.get("workingDir", "/"))
    mounts = trainer.get("volumeMounts", ())
    places = [mount["mountPath"] for mount in mounts]
    kept = [mount for mount in mounts if "persistentVolumeClaim" in job.pod.volumes[mount["name"]]]
    writable = [mount["mountPath"] for mount in kept if not mount.get("readOnly")]
    for key, path in _files(recipe, ""):
        there, allowed = str(folder / path), writable if key == "run" else places
        if not is_below(there, allowed):
            what = "claim to write to" if key == "run" else "volume"
            raise ValueError(
                f"{key} is {path}, which is {there} in the pods of overlay {overlay}: no {what} is "
                f"mounted there; choose a folder below {', '.join(sorted(allowed))}"
            )


def _files(tree: BaseModel, above: str) -> Iterator[tuple[str, str]]:
    """Key and path of every file or folder of the recipe; home folders are left out."""
    for name, value in tree:
        if isinstance(value, BaseModel):
            yield from _files(value, f"{above}{name}.")
        elif isinstance(value, Path) and not str(value).startswith("~"):
            yield f"{above}{name}", str(value)

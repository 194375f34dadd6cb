"""Accessors for Kubernetes manifests: pods, the Jobs that create them, mounts and quantities.

Manifests are the mappings that the YAML parser returns. A missing entry is treated as empty.
Nothing is validated here.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import yaml

Manifest = Mapping[str, Any]
GPU = "nvidia.com/gpu"
CLAIM = "persistentVolumeClaim"

_WITH_TEMPLATE = ("Deployment", "DaemonSet", "ReplicaSet")
# Where KServe mounts the model, and the fields of a predictor that are not fields of a pod.
_MODELS = "/mnt/models"
_OF_KSERVE = ("model", "minReplicas", "maxReplicas", "scaleMetric", "scaleTarget")
# Suffixes of quantities such as 500m, 2 and 1.5Gi.
_BINARY = {suffix + "i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
_DECIMAL = {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_FACTORS = {"": Decimal(1), "m": Decimal("0.001"), **_BINARY, **_DECIMAL}

# The C parser, which PyYAML's wheels include, is ten times as fast as the Python parser.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(text: str) -> Any:
    """Parse a YAML file with a single document."""
    return yaml.load(text, _LOADER)


def load_all(text: str) -> list[Any]:
    """Parse all documents of a YAML file, in order."""
    return list(yaml.load_all(text, _LOADER))


@dataclass(frozen=True)
class Pod:
    """A pod template. `where` is the name of the object that contains it, such as Job/kway."""

    where: str
    template: Manifest
    # The autoscaler on a Ray cluster's head node scales workers through the Kubernetes API.
    needs_token: bool = False
    is_of_ray: bool = False

    @property
    def spec(self) -> Manifest:
        return at(self.template, "spec")

    @property
    def labels(self) -> Manifest:
        return at(self.template, "metadata", "labels")

    @property
    def annotations(self) -> Manifest:
        return at(self.template, "metadata", "annotations")

    @property
    def containers(self) -> Sequence[Manifest]:
        """All containers, init containers first."""
        return [*self.spec.get("initContainers", ()), *self.spec.get("containers", ())]

    @property
    def volumes(self) -> dict[str, Manifest]:
        return {volume.get("name", ""): volume for volume in self.spec.get("volumes", ())}


@dataclass(frozen=True)
class Job:
    """`num_pods` identical pods. `first_pod`: host name of the pod with index 0, or empty."""

    spec: Manifest
    pod: Pod
    first_pod: str
    num_pods: Any
    # Variables that a controller sets in every container.
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.pod.where

    @property
    def trainer(self) -> Manifest | None:
        """The container that runs `kway train`."""
        return next((each for each in self.pod.containers if trains(each)), None)


def at(tree: Any, *keys: str) -> Manifest:
    """Return the mapping at this path of keys, or an empty mapping if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def name_of(manifest: Manifest) -> str:
    return f"{manifest.get('kind')}/{at(manifest, 'metadata').get('name')}"


def of_kind(manifests: Sequence[Manifest], kind: str) -> Iterator[Manifest]:
    return (manifest for manifest in manifests if manifest.get("kind") == kind)


def by_name(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of a kind, keyed by `metadata.name`."""
    return {at(each, "metadata").get("name", ""): each for each in of_kind(manifests, kind)}


def jobs(manifests: Sequence[Manifest]) -> Iterator[Job]:
    """Yield all Jobs, including those in JobSets and TrainingRuntimes."""
    for manifest in manifests:
        spec, name = at(manifest, "spec"), at(manifest, "metadata").get("name", "")
        match manifest.get("kind"):
            case "Job":
                pod = Pod(name_of(manifest), at(spec, "template"))
                host = f"{name}-0.{pod.spec.get('subdomain')}"
                yield Job(spec, pod, host, spec.get("completions", 1))
            case "JobSet":
                yield from _of_job_set(manifest, spec)
            case "TrainingRuntime":
                nodes = at(spec, "mlPolicy").get("numNodes", 1)
                for job in _of_job_set(manifest, at(spec, "template", "spec")):
                    # Kubeflow Trainer's torch plugin sets these variables.
                    given = {"PET_NNODES": str(nodes), "PET_MASTER_ADDR": job.first_pod}
                    yield Job(job.spec, job.pod, job.first_pod, nodes, given)


def _of_job_set(manifest: Manifest, job_set: Manifest) -> Iterator[Job]:
    name = at(manifest, "metadata").get("name", "")
    subdomain = at(job_set, "network").get("subdomain", name)
    for replicated in job_set.get("replicatedJobs", ()):
        spec = at(replicated, "template", "spec")
        host = f"{name}-{replicated.get('name')}-0-0.{subdomain}"
        pod = Pod(name_of(manifest), at(spec, "template"))
        yield Job(spec, pod, host, spec.get("completions", 1))


def pods(manifests: Sequence[Manifest]) -> list[Pod]:
    """Return all pods that the manifests start."""
    found = [job.pod for job in jobs(manifests)]
    for manifest in manifests:
        kind, spec, where = manifest.get("kind"), at(manifest, "spec"), name_of(manifest)
        if kind == "Pod":
            found.append(Pod(where, manifest))
        elif kind in _WITH_TEMPLATE:
            found.append(Pod(where, at(spec, "template")))
        elif kind == "InferenceService":
            found += _pods_of_kserve(manifests, at(spec, "predictor"))
        elif kind == "RayService":
            found += pods_of_ray(where, at(spec, "rayClusterConfig"))
    return found


def _pods_of_kserve(manifests: Sequence[Manifest], predictor: Manifest) -> Iterator[Pod]:
    """Yield the pod that KServe makes of a ServingRuntime and the predictor of a service."""
    model = at(predictor, "model")
    runtime = by_name(manifests, "ServingRuntime").get(str(model.get("runtime")), {})
    spec = at(runtime, "spec")
    claim = str(model.get("storageUri", "")).removeprefix("pvc://").partition("/")[0]
    mount = {"name": "model", "mountPath": _MODELS, "readOnly": True}
    containers = [
        {**each, "volumeMounts": [*each.get("volumeMounts", ()), mount]}
        for each in spec.get("containers", ())
    ]
    volume = {"name": "model", CLAIM: {"claimName": claim, "readOnly": True}}
    volumes = [*spec.get("volumes", ()), volume]
    of_pod = {key: value for key, value in predictor.items() if key not in _OF_KSERVE}
    pod = {**of_pod, "containers": containers, "volumes": volumes}
    template = {"metadata": {"labels": at(spec, "labels")}, "spec": pod}
    yield Pod(name_of(runtime), template)


def pods_of_ray(where: str, cluster: Manifest) -> Iterator[Pod]:
    """Yield the head, then one pod of each worker group."""
    scales = bool(cluster.get("enableInTreeAutoscaling"))
    head = at(cluster, "headGroupSpec", "template")
    yield Pod(f"{where} head", head, needs_token=scales, is_of_ray=True)
    for group in cluster.get("workerGroupSpecs", ()):
        yield Pod(f"{where} {group.get('groupName')}", at(group, "template"), is_of_ray=True)


def environment(container: Manifest, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables with a literal value."""
    stated = {e["name"]: str(e["value"]) for e in container.get("env", ()) if "value" in e}
    return {**(given or {}), **stated}


def words(container: Manifest, given: Mapping[str, str] | None = None) -> list[str]:
    """Return the command and its arguments, with `$(NAME)` expanded if its value is literal."""
    variables = environment(container, given)
    found = []
    for word in (*container.get("command", ()), *container.get("args", ())):
        for name, value in variables.items():
            word = str(word).replace(f"$({name})", value)
        found.append(str(word))
    return found


def option(line: Sequence[str], name: str) -> str | None:
    """Return the argument that follows `name`, or None."""
    following = dict(pairwise(line))
    return following.get(name)


def trains(container: Manifest) -> bool:
    """Return whether the container runs `kway train`."""
    return "kway train" in " ".join(words(container))


def serves(container: Manifest) -> bool:
    """Return whether the container runs `kway serve`."""
    return words(container)[:2] == ["kway", "serve"]


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether the path, with `..` resolved, is one of the folders or inside one."""
    resolved = PurePosixPath(posixpath.normpath(path))
    return any(resolved.is_relative_to(posixpath.normpath(folder)) for folder in folders if folder)


def mount_paths(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[str]:
    """Return the paths at which the container mounts volumes of these kinds."""
    return [str(mount.get("mountPath")) for mount in _mounts(pod, container, kinds)]


def writable_mounts(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[str]:
    """Return the mount paths of volumes of these kinds that are writable.

    A volume is read-only if either its mount or its claim is.
    """
    return [
        str(mount.get("mountPath"))
        for mount in _mounts(pod, container, kinds)
        if not mount.get("readOnly")
        and not at(pod.volumes.get(mount.get("name", ""), {}), CLAIM).get("readOnly")
    ]


def _mounts(pod: Pod, container: Manifest, kinds: Iterable[str]) -> list[Manifest]:
    kinds = set(kinds)
    return [
        mount
        for mount in container.get("volumeMounts", ())
        if kinds & pod.volumes.get(mount.get("name", ""), {}).keys()
    ]


def quantity(text: object) -> Decimal:
    """Parse `2Gi` -> 2147483648, `500m` -> 0.5. Raises ValueError for an invalid quantity."""
    number, unit = _split_quantity(text)
    return number * _FACTORS[unit]


def multiply(text: object, factor: int) -> str:
    """Multiply a quantity: `8Gi` x 4 -> `32Gi`. Raises ValueError for an invalid quantity."""
    number, unit = _split_quantity(text)
    return f"{number * factor}{unit}"


def _split_quantity(text: object) -> tuple[Decimal, str]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]{0,2})", str(text))
    if found is None or found[2] not in _FACTORS:
        raise ValueError(f"{text!r} is not a valid quantity: use a quantity such as 500m or 1.5Gi")
    return Decimal(found[1]), found[2]

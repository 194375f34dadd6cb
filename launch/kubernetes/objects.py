"""What the kinds of manifests have in common: pods, and jobs that repeat a pod.

Manifests are plain mappings, as YAML gives them; what is absent is empty. Nothing is checked here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Manifest = Mapping[str, Any]
GPU = "nvidia.com/gpu"

_WITH_A_TEMPLATE = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")


@dataclass(frozen=True)
class Pod:
    """A pod's template. `where` is its object, as in Job/kway."""

    where: str
    template: Manifest
    # The autoscaler in the head of a Ray cluster asks the API server for pods.
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
        """Those that run first included."""
        return [*self.spec.get("initContainers", ()), *self.spec.get("containers", ())]

    @property
    def volumes(self) -> dict[str, Manifest]:
        return {volume.get("name", ""): volume for volume in self.spec.get("volumes", ())}


@dataclass(frozen=True)
class Job:
    """`num_pods` equal pods; `first_pod` is the host name of the one with index 0, or empty."""

    spec: Manifest
    pod: Pod
    first_pod: str
    num_pods: Any
    # Set by a controller for every container.
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.pod.where

    @property
    def trainer(self) -> Manifest | None:
        """The container that runs `kway train`."""
        return next((each for each in self.pod.containers if trains(each)), None)


def at(tree: Any, *keys: str) -> Manifest:
    """The mapping below these keys, empty where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def name_of(manifest: Manifest) -> str:
    return f"{manifest.get('kind')}/{at(manifest, 'metadata').get('name')}"


def jobs(manifests: Sequence[Manifest]) -> Iterator[Job]:
    """The Jobs, alone or inside of JobSets and TrainingRuntimes."""
    for manifest in manifests:
        spec, name = at(manifest, "spec"), at(manifest, "metadata").get("name", "")
        match manifest.get("kind"):
            case "Job":
                pod = Pod(name_of(manifest), at(spec, "template"))
                host = f"{name}-0.{pod.spec.get('subdomain')}"
                yield Job(spec, pod, host, spec.get("completions", 1))
            case "JobSet":
                yield from _of_a_set(manifest, spec)
            case "TrainingRuntime":
                nodes = at(spec, "mlPolicy").get("numNodes", 1)
                for job in _of_a_set(manifest, at(spec, "template", "spec")):
                    # As Kubeflow Trainer's torch plugin sets them.
                    given = {"PET_NNODES": str(nodes), "PET_MASTER_ADDR": job.first_pod}
                    yield Job(job.spec, job.pod, job.first_pod, nodes, given)


def _of_a_set(manifest: Manifest, job_set: Manifest) -> Iterator[Job]:
    name = at(manifest, "metadata").get("name", "")
    subdomain = at(job_set, "network").get("subdomain", name)
    for replicated in job_set.get("replicatedJobs", ()):
        spec = at(replicated, "template", "spec")
        host = f"{name}-{replicated.get('name')}-0-0.{subdomain}"
        pod = Pod(name_of(manifest), at(spec, "template"))
        yield Job(spec, pod, host, spec.get("completions", 1))


def pods(manifests: Sequence[Manifest]) -> list[Pod]:
    """Every pod that applying the manifests would start."""
    found = [job.pod for job in jobs(manifests)]
    for manifest in manifests:
        kind, spec, where = manifest.get("kind"), at(manifest, "spec"), name_of(manifest)
        if kind == "Pod":
            found.append(Pod(where, manifest))
        elif kind in _WITH_A_TEMPLATE:
            found.append(Pod(where, at(spec, "template")))
        elif kind == "RayService":
            found += pods_of_ray(where, at(spec, "rayClusterConfig"))
    return found


def pods_of_ray(where: str, cluster: Manifest) -> Iterator[Pod]:
    """The head first, then one of each group of workers."""
    scales = bool(cluster.get("enableInTreeAutoscaling"))
    head = at(cluster, "headGroupSpec", "template")
    yield Pod(f"{where} head", head, needs_token=scales, is_of_ray=True)
    for group in cluster.get("workerGroupSpecs", ()):
        yield Pod(f"{where} {group.get('groupName')}", at(group, "template"), is_of_ray=True)


def environment(container: Manifest, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables with a stated value."""
    stated = {e["name"]: str(e["value"]) for e in container.get("env", ()) if "value" in e}
    return {**(given or {}), **stated}


def words(container: Manifest, given: Mapping[str, str] | None = None) -> list[str]:
    """The command and its arguments, `$(NAME)` expanded where the value is stated."""
    variables = environment(container, given)
    found = []
    for word in (*container.get("command", ()), *container.get("args", ())):
        for name, value in variables.items():
            word = str(word).replace(f"$({name})", value)
        found.append(str(word))
    return found


def option(line: Sequence[str], name: str) -> str | None:
    """The word after `name`."""
    following = dict(pairwise(line))
    return following.get(name)


def trains(container: Manifest) -> bool:
    """Whether it runs `kway train`."""
    return "kway train" in " ".join(words(container))

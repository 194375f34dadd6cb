"""Rules for groups of Jobs: what JobSet and Kubeflow Trainer need to start a run anew as a whole.

Each rule gives whole lines.
"""

from collections.abc import Iterator, Sequence

from launch.kubernetes.objects import Manifest, at, name_of

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def groups_come_back(manifests: Sequence[Manifest]) -> Iterator[str]:
    """A group restarts from outside, as its ranks do not inside, and its pods have names."""
    for manifest, group in _groups(manifests):
        if not at(group, "failurePolicy").get("maxRestarts"):
            yield f"{name_of(manifest)} has no failurePolicy.maxRestarts: one failure ends the run"
        for key in ("enableDNSHostnames", "publishNotReadyAddresses"):
            if at(group, "network").get(key, True) is not True:
                yield f"{name_of(manifest)}: network.{key} is false: its pods do not find pod 0"
        for replicated in group.get("replicatedJobs", ()):
            if (number := replicated.get("replicas", 1)) != 1:
                yield f"{name_of(manifest)} starts {number} Jobs, each a run: give replicas 1"


def trainer_finds_its_container(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Kubeflow Trainer gives nodes and ranks to container `node` of the Job with its label."""
    for manifest, group in _groups(manifests):
        if manifest.get("kind") != "TrainingRuntime":
            continue
        for replicated in group.get("replicatedJobs", ()):
            template = at(replicated, "template")
            step = at(template, "metadata", "labels").get(_STEP)
            if step != "trainer":
                yield f"{name_of(manifest)}: label {_STEP} of its Job is {step}: make it trainer"
            pod = at(template, "spec", "template", "spec")
            names = [container.get("name") for container in pod.get("containers", ())]
            if "node" not in names:
                yield f"{name_of(manifest)}: container {', '.join(names)} has to be named node"


def _groups(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """What starts Jobs, and the JobSet's specification in it."""
    for manifest in manifests:
        if manifest.get("kind") == "JobSet":
            yield manifest, at(manifest, "spec")
        elif manifest.get("kind") == "TrainingRuntime":
            yield manifest, at(manifest, "spec", "template", "spec")


GROUP_RULES = (groups_come_back, trainer_finds_its_container)

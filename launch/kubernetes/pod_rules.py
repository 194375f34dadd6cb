"""Rules for any pod: what it may do on its machine, what it may take, and where its files are.

Each rule gives lines, one for what it finds wrong; none is good.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from launch.kubernetes.objects import Manifest, Pod, at, environment, words
from launch.kubernetes.quantity import quantity

# Absolute paths within a script.
_PATH = re.compile(r"(?<![\w./:-])/[\w.-]+(?:/[\w.-]+)*")
# Of every image and every machine.
_ALWAYS_THERE = ("/bin", "/dev/null", "/proc", "/sys", "/usr")
_PORT_NAME_LENGTH = 15


def may_do_little(pod: Pod) -> Iterator[str]:
    """Pod security's `restricted`, a read-only root, and no account."""
    spec = pod.spec
    for key in ("hostPID", "hostIPC"):
        if spec.get(key):
            yield f"{key} shows it the other processes of its machine: leave it out"
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "hostNetwork finds no other pod by name: set dnsPolicy to ClusterFirstWithHostNet"
    if spec.get("automountServiceAccountToken") is not False and not pod.needs_token:
        yield "automountServiceAccountToken is not false: it has no use for an account"
    for volume in pod.volumes.values():
        if "hostPath" in volume:
            yield f"volume {volume.get('name')} is a hostPath: use a claim or an emptyDir"
    for container in pod.containers:
        for line in _container_may_do_little(container, at(spec, "securityContext")):
            yield f"container {container.get('name')}: {line}"


def _container_may_do_little(container: Manifest, of_pod: Manifest) -> Iterator[str]:
    context = at(container, "securityContext")
    both = {**of_pod, **context}
    capabilities = at(context, "capabilities")
    if context.get("privileged"):
        yield "privileged is true: leave it out"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem is not true: what it writes belongs on volumes"
    if "ALL" not in capabilities.get("drop", ()) or capabilities.get("add"):
        yield "capabilities are not dropped: set drop to [ALL] and add none"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "runAsNonRoot is not true"
    if at(both, "seccompProfile").get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is missing: set its type to RuntimeDefault"


def takes_what_it_says(pod: Pod) -> Iterator[str]:
    """CPU and memory are stated, requests are within limits, and memory volumes within memory."""
    for container in pod.containers:
        name, resources = container.get("name"), at(container, "resources")
        requests, limits = at(resources, "requests"), at(resources, "limits")
        for resource in ("cpu", "memory"):
            if resource not in requests or resource not in limits:
                yield f"container {name}: resources state no {resource}: give requests and limits"
        for resource, amount in requests.items():
            if resource in limits and quantity(amount) > quantity(limits[resource]):
                yield (
                    f"container {name}: requests {resource} {amount} is above its limit "
                    f"{limits[resource]}"
                )
        yield from _memory_volumes(pod, container, limits.get("memory"))


def _memory_volumes(pod: Pod, container: Manifest, limit: object) -> Iterator[str]:
    for mount in container.get("volumeMounts", ()):
        folder = at(pod.volumes.get(mount.get("name"), {}), "emptyDir")
        if folder.get("medium") != "Memory":
            continue
        size = folder.get("sizeLimit")
        if size is None:
            yield f"volume {mount['name']} is memory without a sizeLimit"
        elif limit is not None and quantity(size) >= quantity(limit):
            yield (
                f"volume {mount['name']} of {size} counts as memory of container "
                f"{container.get('name')}, which has {limit}: make one smaller, or the other larger"
            )


def image_is_one(pod: Pod) -> Iterator[str]:
    """A tag that moves makes pods of one run differ."""
    for container in pod.containers:
        image = str(container.get("image", ""))
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@" not in image and tag in ("", "latest"):
            yield f"container {container.get('name')}: image {image!r} has no fixed tag: give one"


def paths_are_mounted(pod: Pod) -> Iterator[str]:
    """Mounts name volumes of the pod, and paths in its words and variables lie below a mount."""
    for container in pod.containers:
        mounts = container.get("volumeMounts", ())
        for mount in mounts:
            if mount.get("name") not in pod.volumes:
                yield f"container {container.get('name')} mounts {mount.get('name')}, no volume"
        places = [*_ALWAYS_THERE, *(mount.get("mountPath", "") for mount in mounts)]
        for path in _paths(container):
            if not is_below(path, places):
                yield f"container {container.get('name')} uses {path}, where nothing is mounted"


def _paths(container: Manifest) -> Iterator[str]:
    folder = PurePosixPath(container.get("workingDir", "/"))
    for word in (*words(container), *environment(container).values()):
        if any(character.isspace() for character in word):
            yield from _PATH.findall(word)
            continue
        value = word.rpartition("=")[2]
        if "/" in value and "://" not in value and "$" not in value:
            yield str(folder / value)


def is_below(path: str, places: list[str]) -> bool:
    """Whether the path is one of the places, or in it."""
    return any(PurePosixPath(path).is_relative_to(place) for place in places if place)


def ports_have_names(pod: Pod) -> Iterator[str]:
    """Services, monitors and policies name them; no two of a pod may share one."""
    ports = [port for container in pod.containers for port in container.get("ports", ())]
    names = [str(port.get("name", "")) for port in ports]
    for port, name in zip(ports, names, strict=True):
        if not name:
            yield f"port {port.get('containerPort')} has no name"
        elif len(name) > _PORT_NAME_LENGTH or names.count(name) > 1:
            yield f"port name {name} is not its own, or has over {_PORT_NAME_LENGTH} characters"
    for container in pod.containers:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("httpGet", "tcpSocket"):
                wanted = at(container, probe, how).get("port", 0)
                if isinstance(wanted, str) and wanted not in names:
                    yield f"container {container.get('name')}: {probe} names no port: {wanted}"


POD_RULES = (may_do_little, takes_what_it_says, image_is_one, paths_are_mounted, ports_have_names)

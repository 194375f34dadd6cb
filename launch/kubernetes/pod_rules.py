"""Rules for all pods: privileges, resources, ports, signals, and where files are mounted.

Each rule yields one line per problem.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from launch.kubernetes.objects import (
    CLAIM,
    Manifest,
    Pod,
    at,
    environment,
    is_below,
    option,
    quantity,
    serves,
    trains,
    words,
    writable_mounts,
)

# Absolute paths in a shell script.
_PATH = re.compile(r"(?<![\w./:-])/[\w.-]+(?:/[\w.-]+)*")
# Paths that exist in every image.
ALWAYS_PRESENT = ("/bin", "/dev/null", "/proc", "/sys", "/usr")
_PORT_NAME_LENGTH = 15
# Sysctls that the pod security standard `restricted` allows.
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    *(f"net.ipv4.ip_{name}" for name in ("local_port_range", "unprivileged_port_start")),
    *(f"net.ipv4.{name}" for name in ("ip_local_reserved_ports", "ping_group_range")),
    *(f"net.ipv4.tcp_{name}" for name in ("syncookies", "keepalive_time", "fin_timeout")),
    *(f"net.ipv4.tcp_keepalive_{name}" for name in ("intvl", "probes")),
}
_SHARED_MEMORY = "/dev/shm"
# The last command of a shell script.
_LAST = re.compile(r"(?:^|[;&|\n])\s*([^;&|\n]+?)\s*$")


def privileges_are_minimal(pod: Pod) -> Iterator[str]:
    """Check that the pod meets the pod security standard `restricted`, has a read-only root file
    system and does not mount an API token."""
    spec = pod.spec
    for key in ("hostPID", "hostIPC"):
        if spec.get(key):
            yield f"{key} exposes other processes on the node: remove it"
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "with hostNetwork, set dnsPolicy to ClusterFirstWithHostNet to resolve other pods"
    if spec.get("automountServiceAccountToken") is not False and not pod.needs_token:
        yield (
            "automountServiceAccountToken is not false: set it to false so that no token is mounted"
        )
    for sysctl in at(spec, "securityContext").get("sysctls", ()):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"sysctl {sysctl.get('name')} is not allowed in a restricted pod: remove it"
    for volume in pod.volumes.values():
        if "hostPath" in volume:
            yield f"volume {volume.get('name')} is a hostPath: use a claim or an emptyDir"
    for container in pod.containers:
        for line in _container_privileges(container, at(spec, "securityContext")):
            yield f"container {container.get('name')}: {line}"


def _container_privileges(container: Manifest, of_pod: Manifest) -> Iterator[str]:
    context = at(container, "securityContext")
    both = {**of_pod, **context}
    capabilities = at(context, "capabilities")
    if context.get("privileged"):
        yield "privileged is true: remove it"
    if context.get("procMount", "Default") != "Default":
        yield f"procMount {context['procMount']} exposes more of /proc: remove it"
    for port in container.get("ports", ()):
        if "hostPort" in port:
            yield f"hostPort {port['hostPort']} opens a port on the node: use a Service"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false: set it to false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem is not true: set it to true, and write only to volumes"
    if "ALL" not in capabilities.get("drop", ()) or capabilities.get("add"):
        yield "capabilities are not dropped: set drop to [ALL] and add none"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "the container may run as root: set runAsNonRoot to true and runAsUser to 1 or more"
    if at(both, "seccompProfile").get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is missing: set its type to RuntimeDefault"


def resources_are_stated(pod: Pod) -> Iterator[str]:
    """Check that CPU and memory are set, and that memory volumes fit within the memory limit."""
    for container in pod.containers:
        name, resources = container.get("name"), at(container, "resources")
        requests, limits = at(resources, "requests"), at(resources, "limits")
        for resource in ("cpu", "memory"):
            if resource not in requests or resource not in limits:
                yield f"container {name}: {resource} has no request or no limit: set both"
        for resource, amount in requests.items():
            if resource in limits and quantity(amount) > quantity(limits[resource]):
                yield (
                    f"container {name}: the {resource} request {amount} is above the limit "
                    f"{limits[resource]}: lower it, or raise the limit"
                )
        for resource in requests.keys() | limits.keys():
            if "/" in resource and requests.get(resource) != limits.get(resource):
                yield (
                    f"container {name}: {resource} has request {requests.get(resource, 'none')} "
                    f"and limit {limits.get(resource, 'none')}: use the same number"
                )
        yield from _memory_volumes(pod, container, limits.get("memory"))


def _memory_volumes(pod: Pod, container: Manifest, limit: object) -> Iterator[str]:
    for mount in container.get("volumeMounts", ()):
        folder = at(pod.volumes.get(mount.get("name"), {}), "emptyDir")
        if folder.get("medium") != "Memory":
            continue
        size = folder.get("sizeLimit")
        if size is None:
            yield f"memory volume {mount['name']} has no sizeLimit: set one"
        elif limit is not None and quantity(size) >= quantity(limit):
            yield (
                f"memory volume {mount['name']} ({size}) is not below the memory limit {limit} of "
                f"container {container.get('name')}: lower sizeLimit, or raise the limit"
            )


def images_have_tags(pod: Pod) -> Iterator[str]:
    """Check that images have fixed tags. Otherwise pods of one run could use different images."""
    for container in pod.containers:
        image = str(container.get("image", ""))
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@" not in image and tag in ("", "latest"):
            yield f"container {container.get('name')}: image {image!r} has no fixed tag: set one"


def paths_are_mounted(pod: Pod) -> Iterator[str]:
    """Check that mounts name volumes of the pod, and that paths in arguments are below a mount."""
    for container in pod.containers:
        mounts = container.get("volumeMounts", ())
        for mount in mounts:
            if mount.get("name") not in pod.volumes:
                yield (
                    f"container {container.get('name')} mounts {mount.get('name')}, which is not a "
                    "volume of the pod: add the volume"
                )
        folders = [*ALWAYS_PRESENT, *(mount.get("mountPath", "") for mount in mounts)]
        for path in _paths(container):
            if not is_below(path, folders):
                yield (
                    f"container {container.get('name')} uses {path}, but no volume is mounted "
                    "there: mount one"
                )


def _paths(container: Manifest) -> Iterator[str]:
    folder = PurePosixPath(container.get("workingDir", "/"))
    for word in (*words(container), *environment(container).values()):
        if any(character.isspace() for character in word):
            yield from _PATH.findall(word)
            continue
        value = word.rpartition("=")[2]
        if "/" in value and "://" not in value and "$" not in value:
            yield str(folder / value)


def results_can_be_written(pod: Pod) -> Iterator[str]:
    """Check that `kway shard`, `eval` and `export` write to a writable claim."""
    for container in pod.containers:
        line, folder = words(container), PurePosixPath(container.get("workingDir", "/"))
        if line[:2] not in (["kway", "shard"], ["kway", "eval"], ["kway", "export"]):
            continue
        run = line[2] if line[1] == "eval" and len(line) > 2 else None
        out = run or option(line, "-o") or option(line, "--out")
        claims = writable_mounts(pod, container, (CLAIM,))
        if out is not None and not is_below(str(folder / out), claims):
            yield (
                f"container {container.get('name')} writes to {out}, but no writable claim is "
                "mounted there: mount one without readOnly"
            )


def shared_memory_is_mounted(pod: Pod) -> Iterator[str]:
    """Check that /dev/shm is a memory volume.

    The default of 64 MiB is too small for loaders, NCCL and Ray.
    """
    for container in pod.containers:
        uses_ray = pod.is_of_ray or (serves(container) and "--no-ray" not in words(container))
        if not (trains(container) or uses_ray):
            continue
        memory = [
            name for name, v in pod.volumes.items() if at(v, "emptyDir").get("medium") == "Memory"
        ]
        mounts = container.get("volumeMounts", ())
        shared = [m for m in mounts if m.get("mountPath") == _SHARED_MEMORY]
        if not any(mount.get("name") in memory for mount in shared):
            yield (
                f"container {container.get('name')} has no memory volume at {_SHARED_MEMORY}: "
                "mount an emptyDir with medium Memory"
            )


def secrets_are_files(pod: Pod) -> Iterator[str]:
    """Check that Secrets are mounted as files, not passed as environment variables.

    Child processes inherit environment variables, and `docker inspect` shows them.
    """
    for container in pod.containers:
        sources = [at(entry, "secretRef") for entry in container.get("envFrom", ())]
        env = container.get("env", ())
        sources += [at(entry, "valueFrom", "secretKeyRef") for entry in env]
        for source in filter(None, sources):
            yield (
                f"container {container.get('name')}: Secret {source.get('name')} is passed as "
                "environment variables: mount it as files"
            )


def signals_reach_kway(pod: Pod) -> Iterator[str]:
    """Check that shell scripts `exec` kway, so that it receives SIGTERM and sets the exit code."""
    for container in pod.containers:
        line = words(container)
        if not line or PurePosixPath(line[0]).name not in ("sh", "bash"):
            continue
        script = next((word for word in line[1:] if not word.startswith("-")), "")
        last = _LAST.search(script.strip())
        if "kway " in script and not (last and last[1].startswith("exec kway ")):
            yield (
                f"container {container.get('name')}: the shell script does not end with `exec kway "
                "…`, so kway does not receive SIGTERM: add exec"
            )


def ports_have_names(pod: Pod) -> Iterator[str]:
    """Check that port names are unique, because Services, monitors and policies refer to them."""
    ports = [port for container in pod.containers for port in container.get("ports", ())]
    names = [str(port.get("name", "")) for port in ports]
    for port, name in zip(ports, names, strict=True):
        if not name:
            yield f"port {port.get('containerPort')} has no name: set one"
        elif len(name) > _PORT_NAME_LENGTH or names.count(name) > 1:
            yield (
                f"port name {name} is not unique or is longer than {_PORT_NAME_LENGTH} characters: "
                "choose another name"
            )
    for container in pod.containers:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("httpGet", "tcpSocket"):
                wanted = at(container, probe, how).get("port", 0)
                if isinstance(wanted, str) and wanted not in names:
                    yield (
                        f"container {container.get('name')}: {probe} uses port {wanted}, which is "
                        "not declared: declare it"
                    )


POD_RULES = (
    privileges_are_minimal,
    resources_are_stated,
    images_have_tags,
    paths_are_mounted,
    results_can_be_written,
    shared_memory_is_mounted,
    secrets_are_files,
    signals_reach_kway,
    ports_have_names,
)

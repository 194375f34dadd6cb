"""Rules across manifests: references resolve, and NetworkPolicies admit the required peers and
ports.

Secrets are created by hand, so they are not checked. NetworkPolicies do not apply to pods on the
host network. Each rule yields one line per problem, including the name of the object.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from launch.kubernetes.objects import (
    CLAIM,
    Job,
    Manifest,
    Pod,
    at,
    by_name,
    is_below,
    jobs,
    load,
    name_of,
    of_kind,
    option,
    pods,
    words,
    writable_mounts,
)


def selectors_match(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Each Service, NetworkPolicy and Deployment selects a pod that has the ports it names."""
    there = pods(manifests)
    for manifest in manifests:
        spec = at(manifest, "spec")
        match manifest.get("kind"):
            case "Service" if "selector" in spec:
                ports = [port.get("targetPort") for port in spec.get("ports", ())]
                yield from _selects(manifest, at(spec, "selector"), ports, there)
            case "NetworkPolicy":
                yield from _policy(manifest, spec, there)
            case "Deployment":
                wanted = at(spec, "selector", "matchLabels")
                own = [Pod(name_of(manifest), at(spec, "template"))]
                yield from _selects(manifest, wanted, [], own)


def _policy(manifest: Manifest, spec: Manifest, there: list[Pod]) -> Iterator[str]:
    rules = spec.get("ingress", ())
    ports = [port.get("port") for rule in rules for port in rule.get("ports", ())]
    yield from _selects(manifest, at(spec, "podSelector", "matchLabels"), ports, there)
    peers = [peer for rule in rules for peer in rule.get("from", ())]
    peers += [peer for rule in spec.get("egress", ()) for peer in rule.get("to", ())]
    for peer in peers:
        if "namespaceSelector" not in peer and "podSelector" in peer:
            yield from _selects(manifest, at(peer, "podSelector", "matchLabels"), [], there)


def _selects(
    manifest: Manifest, wanted: Manifest, ports: Sequence[object], there: list[Pod]
) -> Iterator[str]:
    found = [pod for pod in there if wanted.items() <= pod.labels.items()]
    if not found:
        labels = ", ".join(f"{key}={value}" for key, value in wanted.items())
        yield f"{name_of(manifest)} selects {labels}, which no pod has"
        return
    named = {p.get("name") for pod in found for c in pod.containers for p in c.get("ports", ())}
    for port in ports:
        if isinstance(port, str) and port not in named:
            yield f"{name_of(manifest)} names port {port}, which no pod of its has"


def config_is_there(manifests: Sequence[Manifest]) -> Iterator[str]:
    """ConfigMaps that pods mount are in the manifests and contain the keys that are used."""
    maps = {
        name: {*at(manifest, "data"), *at(manifest, "binaryData")}
        for name, manifest in by_name(manifests, "ConfigMap").items()
    }
    for pod in pods(manifests):
        for volume in pod.volumes.values():
            source = at(volume, "configMap")
            if not source or source.get("optional"):
                continue
            if source.get("name") not in maps:
                yield f"{pod.where} mounts ConfigMap {source.get('name')}, which is not there"
                continue
            keys = maps[source["name"]]
            for key in _keys(pod, volume):
                if key not in keys:
                    yield (
                        f"{pod.where} uses {key} of ConfigMap {source['name']}, which has "
                        f"{', '.join(sorted(keys)) or 'no key'}"
                    )


def _keys(pod: Pod, volume: Manifest) -> Iterator[str]:
    """Keys of a mounted ConfigMap that the pod uses as items, subPaths or files in arguments."""
    for item in at(volume, "configMap").get("items", ()):
        yield str(item.get("key"))
    for container in pod.containers:
        for mount in container.get("volumeMounts", ()):
            if mount.get("name") != volume.get("name"):
                continue
            if "subPath" in mount:
                yield str(mount["subPath"])
                continue
            for word in words(container):
                path = PurePosixPath(word)
                if str(path.parent) == mount.get("mountPath"):
                    yield path.name


def claims_are_there(manifests: Sequence[Manifest]) -> Iterator[str]:
    """PersistentVolumeClaims that pods mount are in the manifests."""
    claims = by_name(manifests, "PersistentVolumeClaim")
    for pod in pods(manifests):
        for volume in pod.volumes.values():
            claim = at(volume, "persistentVolumeClaim").get("claimName")
            if claim is not None and claim not in claims:
                yield f"{pod.where} mounts claim {claim}, which is not there"


def rendezvous_has_a_name(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Pods of a plain training Job can resolve each other's names before they are ready."""
    services = by_name(manifests, "Service")
    for job in jobs(manifests):
        if not job.where.startswith("Job/") or job.trainer is None:
            continue
        service = at(services, str(job.pod.spec.get("subdomain")), "spec")
        if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
            yield (
                f"{job.where}: no headless Service named as its subdomain "
                f"({job.pod.spec.get('subdomain')}) with publishNotReadyAddresses"
            )


def runs_can_be_written(manifests: Sequence[Manifest]) -> Iterator[str]:
    """The `run` folder of the mounted recipe is on a claim that is not read-only."""
    maps = {
        name: at(manifest, "data") for name, manifest in by_name(manifests, "ConfigMap").items()
    }
    for job in jobs(manifests):
        if (trainer := job.trainer) is None:
            continue
        names = [at(v, "configMap").get("name") for v in job.pod.volumes.values()]
        recipe = load(at(maps, *filter(None, names)).get("recipe.yaml", "{}"))
        run = PurePosixPath(trainer.get("workingDir", "/")) / str(at(recipe).get("run", "."))
        if not is_below(str(run), writable_mounts(job.pod, trainer, (CLAIM,))):
            yield (
                f"{job.where}: the recipe's run is {run}, and no claim is mounted there to write "
                "to: mount one without readOnly"
            )


def runtime_is_there(manifests: Sequence[Manifest]) -> Iterator[str]:
    """A TrainJob's runtime is in the manifests and has the same number of nodes."""
    runtimes = {
        name: at(manifest, "spec", "mlPolicy").get("numNodes", 1)
        for name, manifest in by_name(manifests, "TrainingRuntime").items()
    }
    for manifest in of_kind(manifests, "TrainJob"):
        reference = at(manifest, "spec", "runtimeRef")
        name = reference.get("name")
        if reference.get("kind") != "TrainingRuntime" or name not in runtimes:
            yield f"{name_of(manifest)} runs on {reference.get('kind')}/{name}: not there"
            continue
        nodes = at(manifest, "spec", "trainer").get("numNodes", runtimes[name])
        if nodes != runtimes[name]:
            yield f"{name_of(manifest)} has {nodes} nodes and its runtime {runtimes[name]}"


def no_policy_lets_all_in(manifests: Sequence[Manifest]) -> Iterator[str]:
    """A NetworkPolicy that admits all peers restricts the ports."""
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in at(policy, "spec").get("ingress", ()):
            if not rule.get("from") and not rule.get("ports"):
                yield f"{name_of(policy)} lets everybody to all ports: name ports, or who may"


def training_is_reached(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Pods of a run reach each other on all ports, and any peer reaches every rank's metrics."""
    for job in jobs(manifests):
        if job.trainer is None or job.pod.spec.get("hostNetwork"):
            continue
        rules = [
            rule
            for policy in of_kind(manifests, "NetworkPolicy")
            if _applies_to(policy, job.pod)
            for rule in at(policy, "spec").get("ingress", ())
        ]
        if not any(_lets_in(rule, job.pod) for rule in rules):
            yield f"{job.where}: no NetworkPolicy lets its pods to one another and nobody else"
        ports = _metrics(job)
        if not any(_opens(rule, port) for rule in rules for port in ports[:1]):
            yield f"{job.where}: no NetworkPolicy lets Prometheus to port {ports[0]}: open it"
        elif not all(any(_opens(rule, port) for rule in rules) for port in ports):
            yield (
                f"{job.where}: its ranks' metrics are at ports {ports[0]} to {ports[-1]}, and its "
                "NetworkPolicy opens fewer: raise endPort"
            )


def _applies_to(policy: Manifest, pod: Pod) -> bool:
    return at(policy, "spec", "podSelector", "matchLabels").items() <= pod.labels.items()


def _lets_in(rule: Manifest, pod: Pod) -> bool:
    """Whether the rule admits pods like this one to all ports."""
    peers = [at(peer, "podSelector", "matchLabels") for peer in rule.get("from", ())]
    return not rule.get("ports") and any(p and p.items() <= pod.labels.items() for p in peers)


def _metrics(job: Job) -> list[int]:
    """The ports on which the pod's ranks serve metrics."""
    trainer = job.trainer or {}
    ranks = option(words(trainer, job.given), "--nproc") or "1"
    ports = {port.get("name"): port.get("containerPort") for port in trainer.get("ports", ())}
    first = ports.get("metrics", 0)
    return [first + rank for rank in range(int(ranks) if ranks.isdecimal() else 1)]


def _opens(rule: Manifest, port: int) -> bool:
    if rule.get("from"):
        return False
    spans = [(p.get("port"), p.get("endPort", p.get("port"))) for p in rule.get("ports", ())]
    return any(isinstance(a, int) and a <= port <= b for a, b in spans)


REFERENCE_RULES = (
    selectors_match,
    config_is_there,
    claims_are_there,
    rendezvous_has_a_name,
    runs_can_be_written,
    runtime_is_there,
    no_policy_lets_all_in,
    training_is_reached,
)

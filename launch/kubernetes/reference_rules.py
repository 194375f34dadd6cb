"""Rules across manifests: references resolve, and NetworkPolicies admit the required peers and
ports.

Secrets are not checked, because they are created by hand. NetworkPolicies do not apply to pods on
the host network. Each rule yields one line per problem, including the name of the object.
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
    """Check that Services, policies and controllers select pods that declare the ports they use."""
    all_pods = pods(manifests)
    for manifest in manifests:
        spec = at(manifest, "spec")
        match manifest.get("kind"):
            case "Service" if "selector" in spec:
                ports = [port.get("targetPort") for port in spec.get("ports", ())]
                yield from _selects(manifest, at(spec, "selector"), ports, all_pods)
            case "NetworkPolicy":
                yield from _policy(manifest, spec, all_pods)
            case "PodDisruptionBudget":
                yield from _selects(manifest, at(spec, "selector", "matchLabels"), [], all_pods)
            case "Deployment":
                wanted = at(spec, "selector", "matchLabels")
                own = [Pod(name_of(manifest), at(spec, "template"))]
                yield from _selects(manifest, wanted, [], own)


def _policy(manifest: Manifest, spec: Manifest, all_pods: list[Pod]) -> Iterator[str]:
    rules = spec.get("ingress", ())
    ports = [port.get("port") for rule in rules for port in rule.get("ports", ())]
    yield from _selects(manifest, at(spec, "podSelector", "matchLabels"), ports, all_pods)
    peers = [peer for rule in rules for peer in rule.get("from", ())]
    peers += [peer for rule in spec.get("egress", ()) for peer in rule.get("to", ())]
    for peer in peers:
        if "namespaceSelector" not in peer and "podSelector" in peer:
            yield from _selects(manifest, at(peer, "podSelector", "matchLabels"), [], all_pods)


def _selects(
    manifest: Manifest, wanted: Manifest, ports: Sequence[object], all_pods: list[Pod]
) -> Iterator[str]:
    found = [pod for pod in all_pods if wanted.items() <= pod.labels.items()]
    if not found:
        labels = ", ".join(f"{key}={value}" for key, value in wanted.items())
        yield f"{name_of(manifest)} selects {labels}, but no pod has these labels"
        return
    named = {p.get("name") for pod in found for c in pod.containers for p in c.get("ports", ())}
    for port in ports:
        if isinstance(port, str) and port not in named:
            yield f"{name_of(manifest)} uses port {port}, but the selected pods do not declare it"


def config_maps_exist(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that mounted ConfigMaps are in the manifests and contain the keys that pods use."""
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
                yield f"{pod.where} mounts ConfigMap {source.get('name')}, which does not exist"
                continue
            keys = maps[source["name"]]
            for key in _keys(pod, volume):
                if key not in keys:
                    yield (
                        f"{pod.where} uses {key} of ConfigMap {source['name']}, which contains "
                        f"{', '.join(sorted(keys)) or 'no keys'}"
                    )


def _keys(pod: Pod, volume: Manifest) -> Iterator[str]:
    """Yield the ConfigMap keys that the pod uses in items, in subPaths or as files in arguments."""
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


def claims_exist(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that mounted PersistentVolumeClaims are in the manifests."""
    claims = by_name(manifests, "PersistentVolumeClaim")
    for pod in pods(manifests):
        for volume in pod.volumes.values():
            claim = at(volume, "persistentVolumeClaim").get("claimName")
            if claim is not None and claim not in claims:
                yield f"{pod.where} mounts claim {claim}, which does not exist"


def pods_have_dns_names(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that pods of a training Job can resolve each other before they are ready."""
    services = by_name(manifests, "Service")
    for job in jobs(manifests):
        if not job.where.startswith("Job/") or job.trainer is None:
            continue
        service = at(services, str(job.pod.spec.get("subdomain")), "spec")
        if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
            yield (
                f"{job.where}: create a headless Service that is named after the subdomain "
                f"({job.pod.spec.get('subdomain')}) and sets publishNotReadyAddresses"
            )


def run_folders_are_writable(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that the `run` folder of the mounted recipe is on a writable claim."""
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
                f"{job.where}: the recipe's run is {run}, but no writable claim is mounted there: "
                "mount one without readOnly"
            )


def runtimes_exist(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that a TrainJob's runtime is in the manifests and has the same number of nodes."""
    runtimes = {
        name: at(manifest, "spec", "mlPolicy").get("numNodes", 1)
        for name, manifest in by_name(manifests, "TrainingRuntime").items()
    }
    for manifest in of_kind(manifests, "TrainJob"):
        reference = at(manifest, "spec", "runtimeRef")
        name = reference.get("name")
        if reference.get("kind") != "TrainingRuntime" or name not in runtimes:
            yield f"{name_of(manifest)} uses {reference.get('kind')}/{name}, which does not exist"
            continue
        nodes = at(manifest, "spec", "trainer").get("numNodes", runtimes[name])
        if nodes != runtimes[name]:
            yield (
                f"{name_of(manifest)} has {nodes} nodes, but its runtime has {runtimes[name]}: use "
                "the same number"
            )


def no_policy_is_open(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that a NetworkPolicy that admits all peers restricts the ports."""
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in at(policy, "spec").get("ingress", ()):
            if not rule.get("from") and not rule.get("ports"):
                yield f"{name_of(policy)} admits all peers to all ports: set `ports` or `from`"


def training_is_reachable(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that a run's pods can reach each other on all ports, and that all peers can reach the
    metrics."""
    for job in jobs(manifests):
        if job.trainer is None or job.pod.spec.get("hostNetwork"):
            continue
        rules = [
            rule
            for policy in of_kind(manifests, "NetworkPolicy")
            if _applies_to(policy, job.pod)
            for rule in at(policy, "spec").get("ingress", ())
        ]
        if not any(_admits(rule, job.pod) for rule in rules):
            yield f"{job.where}: add a NetworkPolicy that admits only its own pods to all ports"
        ports = _metrics(job)
        if not any(_opens(rule, port) for rule in rules for port in ports[:1]):
            yield f"{job.where}: no NetworkPolicy admits Prometheus to port {ports[0]}: add one"
        elif not all(any(_opens(rule, port) for rule in rules) for port in ports):
            yield (
                f"{job.where}: its ranks serve metrics on ports {ports[0]} to {ports[-1]}, but the "
                "NetworkPolicy opens fewer: raise endPort"
            )


def _applies_to(policy: Manifest, pod: Pod) -> bool:
    return at(policy, "spec", "podSelector", "matchLabels").items() <= pod.labels.items()


def _admits(rule: Manifest, pod: Pod) -> bool:
    """Return whether the rule admits pods like this one to all ports."""
    peers = [at(peer, "podSelector", "matchLabels") for peer in rule.get("from", ())]
    return not rule.get("ports") and any(p and p.items() <= pod.labels.items() for p in peers)


def _metrics(job: Job) -> list[int]:
    """Return the ports on which the pod's ranks serve metrics."""
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
    config_maps_exist,
    claims_exist,
    pods_have_dns_names,
    run_folders_are_writable,
    runtimes_exist,
    no_policy_is_open,
    training_is_reachable,
)

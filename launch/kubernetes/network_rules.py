"""Rules for who reaches what: NetworkPolicies, and the ports of metrics and meetings.

They do not hold on the host's network. Each rule gives whole lines.
"""

from collections.abc import Iterator, Sequence

from launch.kubernetes.objects import Job, Manifest, Pod, at, jobs, name_of, option, words

_LAST_PORT = "endPort"


def no_policy_lets_all_in(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What is open to all is named by its port."""
    for policy in _policies(manifests):
        for rule in at(policy, "spec").get("ingress", ()):
            if not rule.get("from") and not rule.get("ports"):
                yield f"{name_of(policy)} lets everybody to all ports: name ports, or who may"


def training_is_reached(manifests: Sequence[Manifest]) -> Iterator[str]:
    """The pods of a run reach each other at all ports, and everybody the metrics of every rank."""
    for job in jobs(manifests):
        if job.trainer is None or job.pod.spec.get("hostNetwork"):
            continue
        rules = [
            rule
            for policy in _policies(manifests)
            if _selects(policy, job.pod)
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


def _policies(manifests: Sequence[Manifest]) -> Iterator[Manifest]:
    return (manifest for manifest in manifests if manifest.get("kind") == "NetworkPolicy")


def _selects(policy: Manifest, pod: Pod) -> bool:
    return at(policy, "spec", "podSelector", "matchLabels").items() <= pod.labels.items()


def _lets_in(rule: Manifest, pod: Pod) -> bool:
    """Whether it lets pods like this one to all ports."""
    peers = [at(peer, "podSelector", "matchLabels") for peer in rule.get("from", ())]
    return not rule.get("ports") and any(p and p.items() <= pod.labels.items() for p in peers)


def _metrics(job: Job) -> list[int]:
    """Where the pod's ranks show their metrics."""
    trainer = job.trainer or {}
    ranks = option(words(trainer, job.given), "--nproc") or "1"
    ports = {port.get("name"): port.get("containerPort") for port in trainer.get("ports", ())}
    first = ports.get("metrics", 0)
    return [first + rank for rank in range(int(ranks) if ranks.isdecimal() else 1)]


def _opens(rule: Manifest, port: int) -> bool:
    if rule.get("from"):
        return False
    spans = [(p.get("port"), p.get(_LAST_PORT, p.get("port"))) for p in rule.get("ports", ())]
    return any(isinstance(a, int) and a <= port <= b for a, b in spans)


NETWORK_RULES = (no_policy_lets_all_in, training_is_reached)

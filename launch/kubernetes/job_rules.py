"""Rules for Jobs, and for the JobSets and TrainingRuntimes that create them.

They cover pod failures, the order of timeouts, the number of pods in the rendezvous, and group
restarts.

Each rule yields one line per problem.
"""

import re
from collections.abc import Iterator, Sequence

from launch.kubernetes.objects import GPU, Job, Manifest, at, name_of, option, words
from trainer.process.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED

# Kubernetes' defaults.
_GRACE_SECONDS = 30
_BACKOFF_LIMIT = 6
_INDEX = "JOB_COMPLETION_INDEX"
_TRAINER_PREFIX = "PET_"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
CHECKPOINT = "kway/checkpoint-seconds"
# Exit code of `kway train` -> action. None: the failure counts towards backoffLimit.
_ACTIONS = {PREEMPTED: "Ignore", BAD_INPUT: "FailJob", INTERRUPTED: "FailJob", FAILED: None}


def failures_are_distinguished(job: Job) -> Iterator[str]:
    """Check that restartPolicy and podFailurePolicy are consistent."""
    restarts, policy = job.pod.spec.get("restartPolicy"), at(job.spec, "podFailurePolicy")
    if restarts not in ("Never", "OnFailure"):
        yield f"restartPolicy is {restarts or 'Always'}: set it to Never"
    if not policy:
        return
    if restarts != "Never":
        yield f"restartPolicy is {restarts}: podFailurePolicy requires Never"
    if job.spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield "podReplacementPolicy must be Failed if podFailurePolicy is set"
    names = [str(container.get("name")) for container in job.pod.containers]
    for rule in policy.get("rules", ()):
        name = at(rule, "onExitCodes").get("containerName")
        if name is not None and name not in names:
            yield f"podFailurePolicy: container {name} is not one of {', '.join(names)}"
        for condition in rule.get("onPodConditions", ()):
            if condition.get("status") != "True":
                yield (
                    f"podFailurePolicy: the status of {condition.get('type')} must be "
                    '"True" in Kubernetes 1.34 and older'
                )


def exit_codes_are_handled(job: Job) -> Iterator[str]:
    """Check that podFailurePolicy handles the exit codes of `kway train` (docs/cluster.md)."""
    if job.trainer is None:
        return
    rules = at(job.spec, "podFailurePolicy").get("rules", ())
    for code, action in _ACTIONS.items():
        actual = next((rule.get("action") for rule in rules if code in _codes(rule)), None)
        if actual != action:
            fix = f"set it to {action}" if action else "omit it, so that backoffLimit applies"
            yield f"podFailurePolicy: action for exit code {code} is {actual or 'missing'}: {fix}"
    disrupted = [rule.get("action") for rule in rules if "DisruptionTarget" in _conditions(rule)]
    if disrupted != ["Ignore"]:
        yield (
            "podFailurePolicy does not ignore DisruptionTarget, so draining a node counts as a "
            "failure: add a rule with action Ignore"
        )


def timeouts_are_in_order(job: Job) -> Iterator[str]:
    """Check that checkpoint time < --shutdown-timeout < grace period."""
    if (trainer := job.trainer) is None:
        return
    if at(trainer, "lifecycle", "preStop"):
        yield "preStop delays SIGTERM and uses up terminationGracePeriodSeconds: remove it"
    grace = job.pod.spec.get("terminationGracePeriodSeconds", _GRACE_SECONDS)
    stated = job.pod.annotations.get(CHECKPOINT)
    shutdown = option(words(trainer, job.given), "--shutdown-timeout")
    if stated is None or shutdown is None:
        yield f"set both the annotation {CHECKPOINT} and --shutdown-timeout"
    elif not float(stated) < float(shutdown) < float(grace):
        yield (
            f"{CHECKPOINT} {stated}, --shutdown-timeout {shutdown} and "
            f"terminationGracePeriodSeconds {grace} must increase in this order: raise the later "
            "ones"
        )


def all_pods_join(job: Job) -> Iterator[str]:
    """Check that the numbers of pods, nodes, ranks and GPUs match, and that pod 0 hosts the
    rendezvous."""
    if (trainer := job.trainer) is None:
        return
    line = words(trainer, job.given)
    nodes, ranks = option(line, "--nnodes"), option(line, "--nproc")
    if nodes != str(job.num_pods):
        yield f"--nnodes is {nodes}, but there are {job.num_pods} pods: use the same number"
    parallel = job.spec.get("parallelism", job.num_pods)
    if job.spec.get("completions", job.num_pods) != parallel:
        yield (
            f"parallelism is {parallel}: set it to completions ({job.num_pods}), so that all pods "
            "run at once"
        )
    if job.spec.get("completionMode") != "Indexed":
        yield "completionMode is not Indexed: set it to Indexed, because pods need an index"
    gpus = at(trainer, "resources", "limits").get(GPU)
    if gpus is not None and str(gpus) != ranks:
        yield f"--nproc is {ranks}, but a pod has {gpus} GPUs: use the same number"
    yield from _rendezvous(job, line)


def _rendezvous(job: Job, line: list[str]) -> Iterator[str]:
    fixed, found = option(line, "--master-addr"), option(line, "--rdzv-endpoint")
    host = (fixed or found or "").partition(":")[0]
    if host != job.first_pod:
        yield f"the rendezvous host is {host or 'not set'}: set it to pod 0, {job.first_pod}"
    if fixed is not None:
        if option(line, "--max-restarts") != "0" or job.spec.get("backoffLimit") != 0:
            yield (
                "--master-addr does not support restarts of single ranks: set --max-restarts 0 and "
                "backoffLimit 0, and restart all pods together"
            )
        return
    limit = job.spec.get("backoffLimit", _BACKOFF_LIMIT)
    if str(job.num_pods).isdecimal() and limit < int(job.num_pods):
        yield (
            f"backoffLimit is {limit}, but losing pod 0 makes all {job.num_pods} pods fail: set it "
            f"to {4 * int(job.num_pods)}"
        )
    settings = [word for word in line if "is_host" in word]
    if not settings:
        yield (
            "--rdzv-conf lacks is_host: add it, because pod 0 cannot resolve its own name at "
            "startup"
        )
    elif re.search(r"is_host=\w", settings[0]):
        yield (
            "is_host is the same in all pods: set it to 1 if JOB_COMPLETION_INDEX is 0, and to 0 "
            "otherwise"
        )


def ports_are_declared(job: Job) -> Iterator[str]:
    """Check that the metrics and the rendezvous use the declared container ports."""
    if (trainer := job.trainer) is None:
        return
    ports = {port.get("name"): port.get("containerPort") for port in trainer.get("ports", ())}
    line = words(trainer, job.given)
    given = dict(word.split("=", 1) for word in line if word.startswith("telemetry."))
    stated = given.get("telemetry.port")
    if str(ports.get("metrics")) != stated:
        yield (
            f"telemetry.port is {stated or 'not set'}, but the container port named metrics is "
            f"{ports.get('metrics')}: use the same number"
        )
    if given.get("telemetry.host") != "0.0.0.0":
        host = given.get("telemetry.host", "not set")
        yield f"telemetry.host is {host}: set it to 0.0.0.0, so that Prometheus can connect"
    found = (option(line, "--rdzv-endpoint") or "").partition(":")[2]
    port = option(line, "--master-port") or found
    if port.isdecimal() and int(port) not in ports.values():
        yield f"the rendezvous port {port} is not declared as a container port: declare it"


def variables_are_given(job: Job) -> Iterator[str]:
    """Check that each `$(NAME)` in an argument is an environment variable of the container."""
    for container in job.pod.containers:
        names = {entry.get("name") for entry in container.get("env", ())} | {_INDEX}
        for name in re.findall(r"\$\(([\w.-]+)\)", " ".join(words(container))):
            if name not in names and not (job.given and name.startswith(_TRAINER_PREFIX)):
                yield f"container {container.get('name')}: $({name}) is not defined: add it to env"


def _codes(rule: Manifest) -> tuple[int, ...]:
    on = at(rule, "onExitCodes")
    return tuple(on.get("values", ())) if on.get("operator") == "In" else ()


def _conditions(rule: Manifest) -> list[str]:
    return [condition.get("type") for condition in rule.get("onPodConditions", ())]


JOB_RULES = (
    failures_are_distinguished,
    exit_codes_are_handled,
    timeouts_are_in_order,
    all_pods_join,
    ports_are_declared,
    variables_are_given,
)


def groups_restart(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that a JobSet restarts all pods together, gives them DNS names and starts one Job."""
    for manifest, group in _groups(manifests):
        if not at(group, "failurePolicy").get("maxRestarts"):
            yield f"{name_of(manifest)}: failurePolicy.maxRestarts is not set: set it to 1 or more"
        for key in ("enableDNSHostnames", "publishNotReadyAddresses"):
            if at(group, "network").get(key, True) is not True:
                yield (
                    f"{name_of(manifest)}: network.{key} is false, so pods cannot find pod 0: "
                    "set it to true"
                )
        for replicated in group.get("replicatedJobs", ()):
            if (number := replicated.get("replicas", 1)) != 1:
                yield f"{name_of(manifest)} starts {number} Jobs for one run: set replicas to 1"


def trainer_finds_its_container(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that the container name and the Job label are those that Kubeflow Trainer requires."""
    for manifest, group in _groups(manifests):
        if manifest.get("kind") != "TrainingRuntime":
            continue
        for replicated in group.get("replicatedJobs", ()):
            template = at(replicated, "template")
            step = at(template, "metadata", "labels").get(_STEP)
            if step != "trainer":
                yield f"{name_of(manifest)}: label {_STEP} of its Job is {step}: set it to trainer"
            pod = at(template, "spec", "template", "spec")
            names = [container.get("name") for container in pod.get("containers", ())]
            if "node" not in names:
                yield f"{name_of(manifest)}: rename container {', '.join(names)} to node"


def _groups(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield the manifests that create Jobs, each with its JobSet specification."""
    for manifest in manifests:
        if manifest.get("kind") == "JobSet":
            yield manifest, at(manifest, "spec")
        elif manifest.get("kind") == "TrainingRuntime":
            yield manifest, at(manifest, "spec", "template", "spec")


GROUP_RULES = (groups_restart, trainer_finds_its_container)

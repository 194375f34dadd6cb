"""Mistakes in manifests are detected, either by a schema or by a rule in `launch/kubernetes`.

test_manifests.py checks that the shipped manifests pass.
"""

from typing import Any

import pytest

from launch.kubernetes import problems
from launch.kubernetes.checks import RULES
from launch.kubernetes.job_rules import JOB_RULES
from launch.kubernetes.objects import jobs, multiply, pods, quantity
from launch.kubernetes.pod_rules import POD_RULES
from tests.k8s.built import built, needs_kustomize, one, schema_errors, set_at
from tests.k8s.cel_rules import defaulted
from tests.k8s.schemas import SCHEMAS
from tests.k8s.test_render_serving import HOST, rendered

JOB, POD, SERVING = "overlays/job", "spec/template/spec", "overlays/serving/rayservice"
REDIS, SLEEP = "gcsFaultToleranceOptions/redisAddress", "lifecycle/preStop/sleep/seconds"
TRAINER = f"{POD}/containers/0"
SET = "spec/replicatedJobs/0/template"
INNER = f"spec/template/{SET}"
RAY = "spec/rayClusterConfig"
HEAD = f"{RAY}/headGroupSpec/template/spec"
WORKER = f"{RAY}/workerGroupSpecs/0"
RAY_WORKER = f"{WORKER}/template/spec/containers/0"
POLICY = "spec/mlPolicy"
AFTER = [{"name": "other", "status": "Complete"}]

UNSAFE = [{"name": "kernel.msgmax", "value": "1"}]
FROM_SECRET = {"secretKeyRef": {"name": "kway-tokens", "key": "tokens"}}
TOKEN = {"name": "HOME", "valueFrom": FROM_SECRET}
NO_EXEC = 'kway train "$@" --rdzv-conf is_host=$host'
AND_MORE = 'exec kway train "$@" --rdzv-conf is_host=$host; true'
LOOPBACK = "http_options: {host: 127.0.0.1, port: 8000}"
ALL_HOSTS = 'exec kway train "$@" --rdzv-conf is_host=1'
ON_CODES = "spec/podFailurePolicy/rules/1/onExitCodes"
WAITS = {"preStop": {"sleep": {"seconds": 170}}}

DEPLOYMENT, KSERVE = (f"overlays/serving/{kind}" for kind in ("deployment", "kserve"))
# Not folders of k8s/, but a rendered Deployment with a Gateway and gRPC, and a RayService.
GATEWAY, UPGRADE = "gateway", "upgrade"
OPTIONS = "spec/upgradeStrategy/clusterUpgradeOptions"
SLOW = ["bundles/glyphs", "--port", "8000", "--timeout", "60", "--no-ray"]
LISTENER = {"name": "https", "port": 443, "protocol": "HTTPS"}

# Folder, kind, path, value to set (None: delete), and a part of the message.
SCHEMA_MISTAKES = [
    (JOB, "Job", "spec/completion", 2, "'completion' was unexpected"),
    (JOB, "Job", "spec/completions", "2", "'2' is not of type"),
    (JOB, "Job", f"{TRAINER}/volumemounts", [], "'volumemounts' was unexpected"),
    (JOB, "Job", f"{TRAINER}/env/0/value", 2, "2 is not of type"),
    (JOB, "Job", f"{TRAINER}/args/5", 1, "1 is not of type"),
    (JOB, "Service", "spec/publishNotReadyAddress", True, "was unexpected"),
    (JOB, "ConfigMap", "data/recipe.yaml", {"run": "x"}, "is not of type"),
    (JOB, "NetworkPolicy", "spec/podSelector/matchLabel", {}, "was unexpected"),
    (JOB, "PersistentVolumeClaim", "spec/accessModes", "ReadWriteMany", "is not of type"),
    ("overlays/jobset", "JobSet", "spec/failurePolicy/maxRestart", 3, "maxRestart"),
    ("overlays/jobset", "JobSet", "spec/failurePolicy/maxRestarts", "3", "'3' is not of type"),
    ("overlays/jobset", "JobSet", "spec/failurePolicy/rules/0/action", "Restart", "not one of"),
    ("overlays/jobset", "JobSet", "spec/failurePolicy/rules/0/name", "1st", "does not match"),
    ("overlays/jobset", "JobSet", f"{SET}/spec/backofflimit", 0, "backofflimit"),
    ("overlays/trainjob", "TrainJob", "spec/runtimeref", {}, "runtimeref"),
    ("overlays/trainjob", "TrainJob", "spec/runtimeRef/kind", "Runtime", "not one of"),
    ("overlays/trainjob", "TrainJob", "spec/trainer/numNodes", 0, "less than the minimum"),
    ("overlays/trainjob", "TrainingRuntime", "spec/mlPolicy/torch/numProcPerNode", 2, "unexpected"),
    ("overlays/trainjob", "TrainingRuntime", f"{INNER}/{POD}/hostnetwork", True, "hostnetwork"),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{RAY}/authOptions/mode",
        "tokens",
        "not one of",
    ),
    ("overlays/serving/rayservice", "RayService", f"{RAY}/gcsFaultTolerance", {}, "unexpected"),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{WORKER}/maxReplicas",
        "4",
        "'4' is not of type",
    ),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{WORKER}/rayStartParams/num-cpus",
        1,
        "1 is not of type",
    ),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{HEAD}/containers/0/livenessprobe",
        {},
        "unexpected",
    ),
    ("overlays/serving/rayservice", "RayService", "spec/serveConfigV2", {}, "{} is not of type"),
    ("overlays/serving/rayservice", "Deployment", "spec/replicas", "1", "'1' is not of type"),
    # Found by CEL rules, after the defaults.
    ("overlays/trainjob", "TrainJob", "metadata/name", "1st", "RFC 1035"),
    ("overlays/trainjob", "TrainingRuntime", f"{POLICY}/mpi", {}, "only one of torch"),
    ("overlays/trainjob", "TrainingRuntime", f"{POLICY}/torch/elasticPolicy", {}, "elasticPolicy"),
    (
        "overlays/jobset",
        "JobSet",
        "spec/replicatedJobs/0/dependsOn",
        AFTER,
        "must not have dependsOn",
    ),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{WORKER}/minReplicas",
        5,
        "minReplicas is above",
    ),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{WORKER}/minReplicas",
        4,
        "replicas is not from",
    ),
    (
        DEPLOYMENT,
        "HorizontalPodAutoscaler",
        "spec/maxReplicas",
        None,
        "'maxReplicas' is a required",
    ),
    (DEPLOYMENT, "PodDisruptionBudget", "spec/maxUnavailables", 1, "was unexpected"),
    (KSERVE, "ServingRuntime", "spec/protocolVersions/0", "v3", "not one of"),
    (KSERVE, "ServingRuntime", "spec/containers/0/livenessprobe", {}, "unexpected"),
    (KSERVE, "ServingRuntime", "spec/containers/0/name", "kway", "named kserve-container"),
    (KSERVE, "InferenceService", "spec/predictor/model/storageUri", "/x", "does not match"),
    (KSERVE, "InferenceService", "spec/predictor/minReplicas", 9, "minReplicas is above"),
    (KSERVE, "InferenceService", "spec/predictor/securityContext/user", 1, "unexpected"),
    (GATEWAY, "Gateway", "spec/listeners/0/tls", None, "'tls' is a required"),
    (GATEWAY, "Gateway", "spec/listeners/1/port", 443, "port and hostname of a listener"),
    (GATEWAY, "Gateway", "spec/listeners/1/name", "https", "names of listeners"),
    (GATEWAY, "HTTPRoute", "spec/rules/0/timeouts/request", "45", "does not match"),
    (GATEWAY, "HTTPRoute", "spec/rules/0/matches/0/path/value", "v1", "must start with /"),
    (GATEWAY, "HTTPRoute", "spec/rules/0/matches/0/path/type", "Regex", "not one of"),
    (GATEWAY, "HTTPRoute", "spec/hostnames/0", "kway.acme.org:443", "does not match"),
    (GATEWAY, "GRPCRoute", "spec/rules/0/matches/0/method/service", "a/b", "does not match"),
    (GATEWAY, "BackendTrafficPolicy", "spec/requestBuffer/limit", "32MB", "does not match"),
    (GATEWAY, "ClientTrafficPolicy", "spec/connections", {}, "unexpected"),
    (UPGRADE, "RayService", f"{OPTIONS}/stepSizePercent", 30, "stepSizePercent is above"),
    (UPGRADE, "RayService", f"{OPTIONS}/intervalSeconds", 0, "less than the minimum"),
    (UPGRADE, "RayService", OPTIONS, None, "clusterUpgradeOptions are required"),
    (UPGRADE, "RayService", "spec/upgradeStrategy/type", "NewCluster", "and only for it"),
    (UPGRADE, "RayService", f"{RAY}/enableInTreeAutoscaling", False, "requires enableInTree"),
]
RULE_MISTAKES = [
    # Servers.
    (DEPLOYMENT, "Deployment", f"{TRAINER}/lifecycle", None, "preStop sleep 0"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/{SLEEP}", 30, "preStop sleep 30"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/args", SLOW, "--timeout 60, preStop sleep 40"),
    (DEPLOYMENT, "Deployment", f"{POD}/terminationGracePeriodSeconds", 45, "Seconds 45 must"),
    (KSERVE, "InferenceService", "spec/predictor/terminationGracePeriodSeconds", None, "30 must"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/readinessProbe", None, "readinessProbe does not"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/startupProbe/httpGet/path", "/v1/model", "startupProbe"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/livenessProbe/httpGet/port", 80, "livenessProbe does"),
    (DEPLOYMENT, "Deployment", f"{TRAINER}/ports/0/containerPort", 80, "port serve is 80, but"),
    (GATEWAY, "Deployment", f"{TRAINER}/ports/1", None, "port grpc is None, but --grpc-port"),
    (DEPLOYMENT, "Deployment", "spec/replicas", 2, "which sets replicas: remove it"),
    (DEPLOYMENT, "Deployment", "metadata/name", "kway", "Deployment/kway-serve, which does not"),
    (DEPLOYMENT, "HorizontalPodAutoscaler", "spec/minReplicas", 9, "minReplicas is above"),
    (DEPLOYMENT, "PodDisruptionBudget", "spec/selector/matchLabels", {"a": "b"}, "selects a=b"),
    (KSERVE, "InferenceService", "spec/predictor/model/storageUri", "pvc://x/y", "mounts claim x"),
    (GATEWAY, "HTTPRoute", "spec/rules/0/backendRefs/0/port", 80, "HTTPRoute/kway: no Service"),
    (GATEWAY, "GRPCRoute", "spec/rules/0/backendRefs/0/name", "kway", "GRPCRoute/kway: no Service"),
    (GATEWAY, "HTTPRoute", "spec/parentRefs/0/sectionName", "http", "its parent"),
    (GATEWAY, "Gateway", "spec/listeners", [LISTENER], "GRPCRoute/kway: its parent"),
    (GATEWAY, "BackendTrafficPolicy", "spec/targetRefs/0/sectionName", "x", "its target"),
    (GATEWAY, "ClientTrafficPolicy", "spec/targetRefs/0/name", "other", "its target"),
    # Privileges.
    (JOB, "Job", f"{TRAINER}/securityContext/privileged", True, "privileged"),
    (JOB, "Job", f"{TRAINER}/securityContext/allowPrivilegeEscalation", None, "Escalation"),
    (JOB, "Job", f"{TRAINER}/securityContext/readOnlyRootFilesystem", False, "readOnlyRoot"),
    (JOB, "Job", f"{TRAINER}/securityContext/capabilities/drop", [], "capabilities"),
    (JOB, "Job", f"{TRAINER}/securityContext/capabilities/add", ["IPC_LOCK"], "capabilities"),
    (JOB, "Job", f"{TRAINER}/securityContext/runAsUser", 0, "runAsNonRoot"),
    (JOB, "Job", f"{POD}/securityContext/runAsNonRoot", None, "runAsNonRoot"),
    (JOB, "Job", f"{POD}/securityContext/seccompProfile", None, "seccompProfile"),
    (JOB, "Job", f"{POD}/hostIPC", True, "hostIPC"),
    (JOB, "Job", f"{POD}/hostNetwork", True, "hostNetwork"),
    (JOB, "Job", f"{POD}/automountServiceAccountToken", None, "automountServiceAccountToken"),
    (JOB, "Job", f"{POD}/volumes/0", {"name": "recipe", "hostPath": {"path": "/"}}, "hostPath"),
    (
        "overlays/serving/rayservice",
        "RayService",
        f"{RAY}/enableInTreeAutoscaling",
        None,
        "automount",
    ),
    ("overlays/jobset", "JobSet", f"{SET}/{TRAINER}/securityContext/privileged", True, "privil"),
    ("base/export", "Job", f"{POD}/initContainers/0/securityContext", None, "evaluate"),
    (JOB, "Job", f"{TRAINER}/securityContext/procMount", "Unmasked", "procMount Unmasked"),
    (JOB, "Job", f"{TRAINER}/ports/0/hostPort", 9400, "hostPort 9400"),
    (JOB, "Job", f"{POD}/securityContext/sysctls", UNSAFE, "sysctl kernel.msgmax"),
    (JOB, "Job", f"{TRAINER}/envFrom", [{"secretRef": {"name": "x"}}], "Secret x is passed as env"),
    (JOB, "Job", f"{TRAINER}/env/3", TOKEN, "Secret kway-tokens is passed as"),
    # Resources.
    (JOB, "Job", f"{TRAINER}/resources/requests/memory", "64Gi", "above the limit"),
    (JOB, "Job", f"{TRAINER}/resources/requests/cpu", "8500m", "above the limit"),
    (JOB, "Job", f"{TRAINER}/resources/limits", None, "cpu has no request"),
    (JOB, "Job", f"{POD}/volumes/5/emptyDir/sizeLimit", "32Gi", "is not below the memory limit"),
    (JOB, "Job", f"{POD}/volumes/5/emptyDir/sizeLimit", None, "has no sizeLimit"),
    (JOB, "Job", f"{TRAINER}/resources/requests/nvidia.com~1gpu", "1", "the same number"),
    (JOB, "Job", f"{TRAINER}/volumeMounts/5", None, "no memory volume at /dev/shm"),
    (JOB, "Job", f"{POD}/volumes/5/emptyDir/medium", None, "no memory volume at /dev/shm"),
    (SERVING, "RayService", f"{RAY_WORKER}/volumeMounts/3", None, "no memory volume at /dev/shm"),
    # Output folders.
    (JOB, "Job", f"{POD}/volumes/2/persistentVolumeClaim/readOnly", True, "run is /work/runs"),
    (JOB, "Job", f"{TRAINER}/volumeMounts/2/readOnly", True, "run is /work/runs/glyphs"),
    (JOB, "ConfigMap", "data/recipe.yaml", "run: shards/x", "run is /work/shards/x"),
    ("base/shards", "Job", f"{TRAINER}/volumeMounts/0/readOnly", True, "writes to shards/glyphs"),
    ("base/export", "Job", f"{TRAINER}/volumeMounts/2/readOnly", True, "writes to bundles/glyphs"),
    ("base/export", "Job", f"{POD}/volumes/1/persistentVolumeClaim/readOnly", True, "runs/glyphs"),
    ("base/shards", "Job", f"{TRAINER}/args/1", "shards/../x", "writes to shards/../x"),
    ("base/export", "Job", f"{TRAINER}/args", ["runs/x", "--out", "shards/x"], "to shards/x"),
    # Images, paths, ports.
    (JOB, "Job", f"{TRAINER}/image", "kway:latest", "no fixed tag"),
    (JOB, "Job", f"{TRAINER}/image", "localhost:5000/kway", "no fixed tag"),
    (JOB, "Job", f"{TRAINER}/args/0", "/recipes/recipe.yaml", "no volume is mounted"),
    (JOB, "Job", f"{TRAINER}/volumeMounts/4", None, "uses /tmp, but no volume"),
    (JOB, "Job", f"{POD}/volumes/2", None, "mounts runs"),
    ("base/shards", "Job", f"{TRAINER}/args/1", "elsewhere/glyphs", "/work/elsewhere/glyphs"),
    ("base/export", "Job", f"{TRAINER}/workingDir", None, "uses /runs/glyphs"),
    ("overlays/serving/rayservice", "Deployment", f"{TRAINER}/volumeMounts/0", None, "uses /data"),
    (JOB, "Job", f"{TRAINER}/ports/0/name", None, "port 9400 has no name"),
    (JOB, "Job", f"{TRAINER}/ports/0/name", "rendezvous", "port name rendezvous"),
    (
        "overlays/serving/rayservice",
        "Deployment",
        f"{TRAINER}/readinessProbe/tcpSocket/port",
        "x",
        "uses port x",
    ),
    # Pod failures.
    (JOB, "Job", f"{POD}/restartPolicy", None, "restartPolicy is Always"),
    (JOB, "Job", f"{POD}/restartPolicy", "OnFailure", "podFailurePolicy requires Never"),
    (JOB, "Job", "spec/podReplacementPolicy", "TerminatingOrFailed", "podReplacementPolicy"),
    (JOB, "Job", "spec/podFailurePolicy/rules/0/onPodConditions/0/status", None, '"True"'),
    (JOB, "Job", "spec/podFailurePolicy/rules/0", None, "DisruptionTarget"),
    (JOB, "Job", "spec/podFailurePolicy/rules/1", None, "exit code 75"),
    (JOB, "Job", "spec/podFailurePolicy/rules/2/onExitCodes/values", [130], "exit code 2"),
    (JOB, "Job", "spec/podFailurePolicy/rules/2/onExitCodes/operator", "NotIn", "exit code 2"),
    (JOB, "Job", "spec/podFailurePolicy/rules/2/onExitCodes/values", [1, 2, 130], "exit code 1"),
    (JOB, "Job", f"{ON_CODES}/containerName", "other", "container other is not one of train"),
    (JOB, "Job", f"{TRAINER}/command/2", NO_EXEC, "does not end with `exec kway"),
    (JOB, "Job", f"{TRAINER}/command/2", AND_MORE, "does not end with `exec kway"),
    (JOB, "Job", "spec/backoffLimit", 0, "backoffLimit is 0"),
    # Timeouts.
    (JOB, "Job", f"{TRAINER}/lifecycle", WAITS, "preStop delays SIGTERM"),
    (JOB, "Job", f"{POD}/terminationGracePeriodSeconds", 150, "must increase in this order"),
    (JOB, "Job", f"{POD}/terminationGracePeriodSeconds", None, "GracePeriodSeconds 30"),
    (JOB, "Job", f"{TRAINER}/args/14", "120", "must increase in this order"),
    (JOB, "Job", "spec/template/metadata/annotations", None, "set both the annotation"),
    # The rendezvous.
    (JOB, "Job", "spec/completions", 3, "--nnodes is 2"),
    (JOB, "Job", "spec/parallelism", 1, "parallelism is 1"),
    (JOB, "Job", "spec/completionMode", None, "not Indexed"),
    (JOB, "Job", f"{TRAINER}/env/0/value", "4", "--nnodes is 4"),
    (JOB, "Job", f"{TRAINER}/args/10", "kway-1.kway:29400", "set it to pod 0, kway-0.kway"),
    (JOB, "Job", f"{TRAINER}/command/2", 'exec kway train "$@"', "is_host"),
    (JOB, "Job", f"{TRAINER}/command/2", ALL_HOSTS, "is_host is the same in all pods"),
    (JOB, "Job", f"{TRAINER}/args/10", "kway-0.kway:29401", "the rendezvous port 29401"),
    (JOB, "Job", f"{TRAINER}/args/2", "telemetry.port=9500", "telemetry.port is 9500"),
    (JOB, "Job", f"{TRAINER}/args/1", "telemetry.host=127.0.0.1", "telemetry.host is 127.0.0.1"),
    (JOB, "Job", f"{TRAINER}/ports/0/containerPort", 9401, "metrics is 9401"),
    (JOB, "Job", f"{TRAINER}/env/2", None, "$(POD_IP)"),
    ("overlays/trainjob", "TrainingRuntime", f"{INNER}/{TRAINER}/args/9", "$(PETS)", "$(PETS)"),
    ("overlays/jobset", "JobSet", f"{SET}/{TRAINER}/args/14", "29401", "the rendezvous port 29401"),
    ("overlays/h100-8x", "Job", f"{TRAINER}/resources/limits/nvidia.com~1gpu", "4", "has 4 GPUs"),
    (
        "overlays/h100-8x",
        "Job",
        f"{POD}/dnsPolicy",
        None,
        "set dnsPolicy to ClusterFirstWithHostNet",
    ),
    ("overlays/jobset", "JobSet", f"{SET}/spec/backoffLimit", 3, "backoffLimit 0"),
    ("overlays/jobset", "JobSet", f"{SET}/{TRAINER}/args/16", "3", "--max-restarts 0"),
    ("overlays/jobset", "JobSet", "spec/network/subdomain", "other", "kway-node-0-0.other"),
    ("overlays/trainjob", "TrainingRuntime", "spec/mlPolicy/numNodes", 3, "its runtime has 3"),
    ("overlays/trainjob", "TrainJob", "spec/runtimeRef/name", "torch", "TrainingRuntime/torch"),
    # Restarts of a group.
    ("overlays/jobset", "JobSet", "spec/failurePolicy", None, "failurePolicy.maxRestarts is not"),
    ("overlays/jobset", "JobSet", "spec/network/enableDNSHostnames", False, "enableDNSHostnames"),
    ("overlays/jobset", "JobSet", "spec/network/publishNotReadyAddresses", False, "publishNot"),
    ("overlays/jobset", "JobSet", "spec/replicatedJobs/0/replicas", 2, "starts 2 Jobs"),
    ("overlays/trainjob", "TrainingRuntime", f"{INNER}/{TRAINER}/name", "train", "train to node"),
    ("overlays/trainjob", "TrainingRuntime", f"{INNER}/metadata", None, "ancestor-step"),
    # Network policies.
    (JOB, "NetworkPolicy", "spec/ingress/1/ports", None, "admits all peers to all ports"),
    (JOB, "NetworkPolicy", "spec/ingress/1", None, "admits Prometheus to port 9400"),
    (JOB, "NetworkPolicy", "spec/ingress/0", None, "admits only its own pods"),
    (JOB, "Job", f"{TRAINER}/env/1/value", "17", "metrics on ports 9400 to 9416"),
    # Serving.
    (SERVING, "RayService", f"{RAY}/authOptions", None, "authOptions.mode is None"),
    (SERVING, "RayService", f"{RAY}/headGroupSpec/rayStartParams/num-cpus", None, "num-cpus of"),
    (SERVING, "RayService", f"{RAY}/{REDIS}", "redis:6379", "redisAddress redis:6379"),
    (SERVING, "Service", "spec/ports/0/port", 6380, "redisAddress kway-redis:6379"),
    (SERVING, "RayService", f"{RAY_WORKER}/ports/0/containerPort", 8001, "port serve is [8001]"),
    (SERVING, "RayService", "spec/serveConfigV2", LOOPBACK, "http_options.host is 127.0.0.1"),
    (SERVING, "RayService", f"{RAY_WORKER}/volumeMounts/0", None, "uses /work/bundles/glyphs"),
    (SERVING, "RayService", f"{RAY_WORKER}/volumeMounts/1", None, "secrets/kway/tokens"),
    (SERVING, "RayService", f"{RAY_WORKER}/lifecycle", None, "preStop sleep 0"),
    (SERVING, "RayService", f"{HEAD}/containers/0/{SLEEP}", 30, "preStop sleep 30"),
    (SERVING, "RayService", f"{HEAD}/terminationGracePeriodSeconds", 40, "Seconds 40 must"),
    # References between objects.
    (JOB, "Service", "spec/selector", {"app": "other"}, "selects app=other"),
    (JOB, "Service", "spec/ports/0/targetPort", "rdzv", "uses port rdzv"),
    (JOB, "Service", "spec/publishNotReadyAddresses", None, "headless Service"),
    (JOB, "Service", "spec/clusterIP", None, "headless Service"),
    (JOB, "Job", f"{POD}/subdomain", "other", "headless Service"),
    (JOB, "NetworkPolicy", "spec/podSelector/matchLabels", {"app": "x"}, "selects app=x"),
    (
        "overlays/serving/rayservice",
        "Deployment",
        "spec/selector/matchLabels",
        {"app": "x"},
        "selects app=x",
    ),
    (JOB, "ConfigMap", "metadata/name", "recipes", "which does not exist"),
    (JOB, "ConfigMap", "data", {"other.yaml": ""}, "uses recipe.yaml"),
    (JOB, "Job", f"{POD}/volumes/2/persistentVolumeClaim/claimName", "rnus", "mounts claim rnus"),
]


MADE = {
    GATEWAY: lambda: rendered(HOST, has_grpc=True),
    UPGRADE: lambda: rendered(kind="rayservice", has_incremental_upgrade=True),
}


def planted(folder: str, kind: str, path: str, value: Any) -> list[dict[str, Any]]:
    manifests = MADE[folder]() if folder in MADE else built(folder)
    set_at(first(manifests, kind), path, value)
    return manifests


def first(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


def named(mistake: tuple[Any, ...]) -> str:
    _, kind, path, value, message = mistake
    return f"{kind}-{path.rpartition('/')[2]}-{value if isinstance(value, str | int) else message}"


@needs_kustomize
@pytest.mark.parametrize("mistake", SCHEMA_MISTAKES, ids=named)
def test_a_schema_detects_the_mistake(mistake):
    folder, kind, path, value, message = mistake
    lines = list(schema_errors(first(planted(folder, kind, path, value), kind)))
    assert any(message in line for line in lines), lines


@needs_kustomize
def test_cel_rules_are_evaluated_after_the_defaults():
    set_of_two = one(built("overlays/jobset"), "JobSet")
    first, second = set_of_two["spec"]["replicatedJobs"] * 2
    second = {**second, "name": "after", "dependsOn": [{"name": "node", "status": "Complete"}]}
    set_of_two["spec"]["replicatedJobs"] = [first, second]
    assert list(schema_errors(set_of_two)) == []
    set_of_two["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    assert [line.partition(": ")[2] for line in schema_errors(set_of_two)] == [
        "startupPolicyOrder InOrder and dependsOn are mutually exclusive"
    ]
    schema = SCHEMAS["RayService"]
    service = one(built("overlays/serving/rayservice"), "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    del group["minReplicas"]
    stored = defaulted(schema, service)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert stored == {**group, "minReplicas": 0}
    assert list(schema_errors(service)) == []
    group["replicas"] = 9
    assert any("replicas is not from" in line for line in schema_errors(service))


@needs_kustomize
@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=named)
def test_a_rule_detects_the_mistake(mistake):
    folder, kind, path, value, message = mistake
    lines = problems(planted(folder, kind, path, value))
    assert any(message in line for line in lines), lines


@needs_kustomize
def test_every_rule_detects_a_mistake():
    rules = {rule.__name__: 0 for rule in (*POD_RULES, *JOB_RULES, *RULES)}
    for mistake in RULE_MISTAKES:
        manifests = planted(*mistake[:4])
        for rule in POD_RULES:
            rules[rule.__name__] += sum(len(list(rule(pod))) for pod in pods(manifests))
        for rule in JOB_RULES:
            rules[rule.__name__] += sum(len(list(rule(job))) for job in jobs(manifests))
        for rule in RULES:
            rules[rule.__name__] += len(list(rule(manifests)))
    assert [name for name, found in rules.items() if not found] == []


@needs_kustomize
def test_a_problem_names_its_object():
    manifests = planted(JOB, "Job", f"{TRAINER}/securityContext/privileged", True)
    assert problems(manifests) == ["Job/kway: container train: privileged is true: remove it"]
    assert one(manifests, "Job")["metadata"]["name"] == "kway"


def test_quantities_are_parsed_as_in_kubernetes():
    read = {"500m": 0.5, "2": 2, "1.5Gi": 1.5 * 2**30, "3k": 3000, "1Ei": 2**60, "100M": 10**8}
    assert {text: float(quantity(text)) for text in read} == read
    assert [multiply(text, 8) for text in ("500m", "2", "1.5Gi")] == ["4000m", "16", "12.0Gi"]
    for text in ("", "-1", "1 Gi", "1g", "1Kk", "Gi"):
        with pytest.raises(ValueError, match="not a valid quantity"):
            quantity(text)

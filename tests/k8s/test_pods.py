"""The rendered pods: privileges, resources, volumes, failures, shutdown, probes, and the objects
that refer to them."""

import re
from pathlib import PurePosixPath

import pytest
import yaml

from launch.kubernetes.kustomize import CLAIM, GPU
from serving.config import ServingConfig
from tests.k8s.manifests import (
    FOLDERS,
    Manifest,
    Pod,
    built,
    by_name,
    needs_kustomize,
    of_kind,
    one,
    option,
    pods,
    words,
)
from tests.k8s.test_render_serving import HOST, rendered
from trainer.process.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED

pytestmark = needs_kustomize
TRAINING = ("cpu-smoke", "h100-8x", "job", "jobset", "kueue", "trainjob")
TRAINING_FOLDERS = [f"overlays/{name}" for name in TRAINING]
FIXED_RANKS = ("overlays/jobset", "overlays/trainjob")
RAY = "overlays/serving/rayservice"
SERVERS = ["base/serving", "overlays/cpu-smoke/serving", "overlays/serving/deployment"]
SERVERS += ["overlays/serving/kserve", "with a gateway"]
SECRETS = {"kway-credentials", "kway-redis", "kway-tokens"}


def read(folder: str) -> list[Manifest]:
    return rendered(**HOST, has_grpc=True) if folder == "with a gateway" else built(folder)


EVERYTHING = [name for name in FOLDERS if not re.search("claims|monitoring", name)]
EVERYTHING.append("with a gateway")
# The variables that Kubernetes or Kubeflow Trainer set in the second pod.
GIVEN = {"PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1"}
GIVEN |= {"PET_MASTER_ADDR": "kway-node-0-0.kway", "PET_NNODES": "2", "POD_IP": "10.0.0.7"}


def mebibytes(amount: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w+)", amount).groups()
    return float(number) * {"Mi": 1, "Gi": 1024}[unit]


def trainer(folder: str) -> Pod:
    (pod,) = (pod for pod in pods(built(folder)) if pod.trains)
    return pod


# ---- every pod ----


@pytest.mark.parametrize("folder", EVERYTHING)
def test_pods_have_no_privileges(folder):
    """They meet the pod security standard `restricted`, except for the network of h100-8x."""
    for pod in pods(read(folder)):
        spec = pod.spec
        is_ray_head = pod.labels.get("kway/ray-node") == "head"  # creates pods through the API
        assert spec["automountServiceAccountToken"] is is_ray_head
        assert spec.get("hostNetwork", False) == (folder == "overlays/h100-8x")
        assert spec.get("dnsPolicy") == (
            "ClusterFirstWithHostNet" if "hostNetwork" in spec else None
        )
        assert not {"hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in pod.volumes.values() if "hostPath" in volume]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            # Child processes inherit environment variables, so Secrets are mounted as files.
            assert "envFrom" not in container
            for entry in container.get("env", ()):
                assert "secretKeyRef" not in entry.get("valueFrom", {})


@pytest.mark.parametrize("folder", EVERYTHING)
def test_resources_are_reserved_and_include_shared_memory(folder):
    """The default of 64 MiB is too small for loaders, NCCL and Ray."""
    for pod in pods(read(folder)):
        needs_it = pod.trains or pod.owner.startswith("RayService") or "export" in pod.owner
        for container in pod.containers:
            limits = container["resources"]["limits"]
            assert container["resources"]["requests"] == limits
            assert {"cpu", "memory"} <= limits.keys()
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            folders = {path: pod.volumes[name].get("emptyDir") for path, name in mounts.items()}
            memory = {path: each for path, each in folders.items() if each and "medium" in each}
            assert ("/dev/shm" in memory) == needs_it
            for each in memory.values():  # counts towards the limit of the container
                assert mebibytes(each["sizeLimit"]) < mebibytes(limits["memory"])


@pytest.mark.parametrize("folder", EVERYTHING)
def test_volumes_probes_and_arguments_refer_to_what_exists(folder):
    manifests = read(folder)
    maps, claims = by_name(manifests, "ConfigMap"), by_name(manifests, "PersistentVolumeClaim")
    for pod in pods(manifests):
        for volume in pod.volumes.values():
            assert volume.get(CLAIM, {}).get("claimName") in {None, *claims}
            assert volume.get("configMap", {}).get("name") in {None, *maps}
            assert volume.get("secret", {}).get("secretName") in {None, *SECRETS}
        for container in pod.containers:
            assert {each["name"] for each in container["volumeMounts"]} <= pod.volumes.keys()
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for asks in ("httpGet", "tcpSocket"):
                    wanted = container.get(probe, {}).get(asks, {})
                    assert wanted.get("port") in {None, *pod.ports}
            variables = {entry["name"]: "x" for entry in container.get("env", ())}
            line = " ".join(words(container, {**GIVEN, **variables}))
            assert not re.search(r"\$\(\w+\)", line)


@pytest.mark.parametrize("folder", EVERYTHING)
def test_selectors_match_pods_that_declare_the_ports(folder):
    manifests = read(folder)
    everything = pods(manifests)
    wanted: list[tuple[Manifest, list[object]]] = []
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                ports = [port["targetPort"] for port in spec["ports"]]
                wanted.append((spec["selector"], ports))
            case "Deployment" | "PodDisruptionBudget":
                wanted.append((spec["selector"]["matchLabels"], []))
            case "NetworkPolicy":
                rules = spec.get("ingress", ())
                ports = [port["port"] for rule in rules for port in rule.get("ports", ())]
                wanted.append((spec["podSelector"]["matchLabels"], ports))
                peers = [peer for rule in rules for peer in rule.get("from", ())]
                peers += [peer for rule in spec.get("egress", ()) for peer in rule.get("to", ())]
                own = [peer for peer in peers if "namespaceSelector" not in peer]
                wanted += [(peer["podSelector"]["matchLabels"], []) for peer in own]
    for labels, ports in wanted:
        selected = [pod for pod in everything if labels.items() <= pod.labels.items()]
        assert selected, labels
        named = {name for pod in selected for name in pod.ports}
        assert {port for port in ports if isinstance(port, str)} <= named


@pytest.mark.parametrize(
    ("name", "folder", "num"),
    [
        ("kway-training", "base/training", 1),
        ("kway-serving", RAY, 2),  # the workers serve while the head is down
        ("kway-servers", RAY, 0),
        ("kway-servers", "overlays/serving/deployment", 1),
    ],
)
def test_pod_monitors_select_a_port_of_every_pod(name, folder, num):
    spec = by_name(built("overlays/monitoring"), "PodMonitor")[name]["spec"]
    absent = {each["key"] for each in spec["selector"].get("matchExpressions", ())}
    wanted = spec["selector"]["matchLabels"].items()
    found = [pod for pod in pods(built(folder)) if wanted <= pod.labels.items()]
    selected = [pod for pod in found if not absent & pod.labels.keys()]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert [endpoint["port"] in pod.ports for pod in selected] == [True] * num


# ---- Jobs and training ----


def action(job: Manifest, code: int) -> str | None:
    """Return the action of the first rule of a Job for an exit code."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In"
        assert "containerName" not in codes
        if code in codes["values"]:
            return str(rule["action"])
    return None


@pytest.mark.parametrize("folder", [*TRAINING_FOLDERS, "base/shards", "base/export"])
def test_jobs_distinguish_failures(folder):
    """A preempted pod is replaced, bad input and Ctrl-C end the Job, and other failures count."""
    (pod,) = pods(built(folder))
    assert pod.spec["restartPolicy"] == "Never"  # as podFailurePolicy requires
    assert pod.job["podReplacementPolicy"] == "Failed"
    assert action(pod.job, PREEMPTED) == ("Ignore" if pod.trains else None)
    assert action(pod.job, BAD_INPUT) == action(pod.job, INTERRUPTED) == "FailJob"
    assert action(pod.job, FAILED) is None
    disruption = {"type": "DisruptionTarget", "status": "True"}  # required before Kubernetes 1.35
    drained = {"action": "Ignore", "onPodConditions": [disruption]}
    assert drained in pod.job["podFailurePolicy"]["rules"]


@pytest.mark.parametrize("folder", TRAINING_FOLDERS)
def test_a_stopped_run_has_time_to_save_a_checkpoint(folder):
    pod = trainer(folder)
    assert "lifecycle" not in pod.main  # preStop would delay SIGTERM
    checkpoint = float(pod.job["template"]["metadata"]["annotations"]["kway/checkpoint-seconds"])
    shutdown = float(option(words(pod.main), "--shutdown-timeout"))
    assert checkpoint < shutdown < pod.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("folder", TRAINING_FOLDERS)
def test_all_pods_of_a_run_join(folder):
    manifests, pod = built(folder), trainer(folder)
    line = words(pod.main, GIVEN)
    recipe = one(manifests, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"recipe-[a-z0-9]{10}", recipe)  # with a hash, so it cannot change
    assert pod.volumes["recipe"]["configMap"]["name"] == recipe
    assert "/etc/kway/recipe.yaml" in line
    num_pods = pod.job.get("completions", 2)
    assert option(line, "--nnodes") == str(num_pods) == str(pod.job.get("parallelism", 2))
    assert pod.job["completionMode"] == "Indexed"
    num_gpus = pod.main["resources"]["limits"].get(GPU, "1")
    assert option(line, "--nproc") == num_gpus
    assert "telemetry.host=0.0.0.0" in line
    assert f"telemetry.port={pod.ports['metrics']}" in line
    if folder in FIXED_RANKS:  # all pods restart together
        port = option(line, "--master-port")
        assert option(line, "--master-addr") == "kway-node-0-0.kway"
        assert (option(line, "--max-restarts"), pod.job["backoffLimit"]) == ("0", 0)
    else:
        host, _, port = option(line, "--rdzv-endpoint").partition(":")
        assert host == f"kway-0.{pod.spec['subdomain']}"
        service = by_name(manifests, "Service")[pod.spec["subdomain"]]["spec"]
        # Pods can resolve each other before they are ready.
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        # Losing pod 0 makes all pods fail.
        assert (option(line, "--max-restarts"), pod.job["backoffLimit"]) == ("3", 4 * num_pods)
    assert int(port) == pod.ports["rendezvous"]


@pytest.mark.parametrize("folder", FIXED_RANKS)
def test_groups_restart_together(folder):
    spec = one(built(folder), "JobSet" if "jobset" in folder else "TrainingRuntime")["spec"]
    group = spec["template"]["spec"] if "template" in spec else spec
    assert group["failurePolicy"]["maxRestarts"] > 0
    (rule,) = group["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert group["network"]["enableDNSHostnames"]
    assert group["network"]["publishNotReadyAddresses"]
    (replicated,) = group["replicatedJobs"]
    assert (replicated["name"], replicated.get("replicas", 1)) == ("node", 1)
    if "template" in spec:  # Trainer finds the runtime, the Job and the container by these names
        reference = one(built(folder), "TrainJob")["spec"]["runtimeRef"]
        assert (reference["kind"], reference["name"]) == ("TrainingRuntime", "kway")
        step = "trainer.kubeflow.org/trainjob-ancestor-step"
        assert replicated["template"]["metadata"]["labels"][step] == "trainer"
        assert trainer(folder).main["name"] == "node"


@pytest.mark.parametrize("folder", TRAINING_FOLDERS)
def test_only_the_pods_of_a_run_reach_its_ranks(folder):
    pod, policy = trainer(folder), one(built(folder), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"]["matchLabels"].items() <= pod.labels.items()
    own, metrics = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    first = pod.ports["metrics"]
    ports = [{"port": first, "endPort": first + 15, "protocol": "TCP"}]  # up to 16 ranks
    assert metrics == {"ports": ports}


# ---- servers ----


@pytest.mark.parametrize("folder", SERVERS)
def test_servers_finish_their_requests_and_answer_probes(folder):
    (pod,) = pods(read(folder))
    line = words(pod.main)
    assert line[:2] == ["kway", "serve"]
    assert "--no-ray" in line
    assert option(line, "--timeout") is None
    wait = pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
    # After SIGTERM, the server has 10 s for requests in progress.
    grace = pod.spec["terminationGracePeriodSeconds"]
    assert ServingConfig().request_timeout_seconds < wait <= grace - 10
    assert pod.ports["serve"] == int(option(line, "--port"))
    assert str(pod.ports.get("grpc")) == str(option(line, "--grpc-port"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod.main[probe]["httpGet"] == {"path": "/health", "port": "serve"}


def ray_service() -> Manifest:
    return dict(one(built(RAY), "RayService")["spec"])


def test_ray_requires_a_token_and_its_head_runs_no_replicas():
    cluster = ray_service()["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}  # else, all who reach Ray can run any code
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    host, _, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
    (offered,) = by_name(built(RAY), "Service")[host]["spec"]["ports"]
    assert str(offered["port"]) == port


def test_every_pod_of_ray_can_run_and_drain_the_application():
    config = yaml.safe_load(ray_service()["serveConfigV2"])
    (application,) = config["applications"]
    settings = application["args"]["config"]
    assert config["http_options"]["host"] == "0.0.0.0"
    for pod in (pod for pod in pods(built(RAY)) if pod.owner.startswith("RayService")):
        folders = [each["mountPath"] for each in pod.main["volumeMounts"]]
        for path in (application["args"]["bundle"], settings["token_file"]):
            assert any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
        assert pod.ports["serve"] == config["http_options"]["port"]
        assert "restartPolicy" not in pod.spec  # KubeRay requires Never for its autoscaler
        # Ray exits at once on SIGTERM.
        wait = pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod.spec["terminationGracePeriodSeconds"]
        assert settings["request_timeout_seconds"] < wait < grace


def test_only_the_api_and_the_metrics_of_ray_are_open_to_all():
    rules = [
        rule
        for policy in of_kind(built(RAY), "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
    ]
    ports = [port["port"] for rule in rules if "from" not in rule for port in rule["ports"]]
    assert ports == ["serve", "metrics"]
    # The Helm chart and the kustomize files of KubeRay use different labels for the operator.
    (operator,) = (rule for rule in rules if {"port": "dashboard"} in rule.get("ports", ()))
    assert len(operator["from"]) == 2


def test_the_autoscaler_has_a_target_that_sets_no_replicas():
    for manifests in map(built, ("overlays/serving/deployment", "overlays/cpu-smoke/serving")):
        spec = one(manifests, "HorizontalPodAutoscaler")["spec"]
        target = by_name(manifests, spec["scaleTargetRef"]["kind"])[spec["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]  # each `kubectl apply` would restore it
        assert spec["minReplicas"] <= spec["maxReplicas"]


@pytest.mark.parametrize("kind", ["deployment", "rayservice"])
def test_routes_and_policies_refer_to_what_exists(kind):
    manifests = rendered(**HOST, kind=kind, has_grpc=kind == "deployment")
    names = {(m["kind"], m["metadata"]["name"], None) for m in manifests}
    ports = {("kway-serve-svc", 8000)}  # created by KubeRay
    for manifest in manifests:
        spec, about = manifest.get("spec", {}), (manifest["kind"], manifest["metadata"]["name"])
        parts = [*spec.get("listeners", ()), *(spec.get("rules") or ())]
        names |= {(*about, part.get("name")) for part in parts}
        if manifest["kind"] == "Service":
            ports |= {(about[1], port["port"]) for port in spec["ports"]}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        for parent in spec.get("parentRefs", ()):
            assert ("Gateway", parent["name"], parent["sectionName"]) in names
        for target in spec.get("targetRefs", ()):
            assert (target["kind"], target["name"], target.get("sectionName")) in names
        if manifest["kind"] in ("HTTPRoute", "GRPCRoute"):
            backends = [backend for rule in spec["rules"] for backend in rule["backendRefs"]]
            assert {(each["name"], each["port"]) for each in backends} <= ports

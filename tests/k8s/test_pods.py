"""The emulated pods and Jobs, which slow tests use instead of a cluster."""

import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.cluster import Cluster, cluster
from tests.k8s.environments import expanded
from tests.k8s.job_controller import Job

pytestmark = pytest.mark.slow  # like every test that uses this emulator
OBJECTS = [
    {
        "kind": "ConfigMap",
        "metadata": {"name": "words"},
        "data": {"one.txt": "first", "two": "second"},
    },
    {"kind": "Secret", "metadata": {"name": "key"}, "data": {"password": "aHVzaA=="}},
    {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}},
    {
        "kind": "Service",
        "metadata": {"name": "team"},
        "spec": {"clusterIP": "None", "selector": {"app": "made-up"}},
    },
]


def job(script: str, **spec: Any) -> dict[str, Any]:
    """Return a Job whose container runs this shell script and mounts all volumes."""
    container = {
        "name": "main",
        "command": ["sh", "-c", textwrap.dedent(script), "name"],
        "args": ["$(GREETING)", "$$(GREETING)", "$(UNKNOWN)"],
        "env": [
            {"name": "WHO", "value": "$$you"},
            {"name": "GREETING", "value": "hello $(WHO)"},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "workingDir": "/work",
        "volumeMounts": [
            {"name": "words", "mountPath": "/etc/words", "readOnly": True},
            {"name": "key", "mountPath": "/var/run/secrets/key", "readOnly": True},
            {"name": "none", "mountPath": "/var/run/secrets/none", "readOnly": True},
            {"name": "shared", "mountPath": "/work/shared"},
            {"name": "shared", "mountPath": "/work/shared-to-read", "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": "team",
        "terminationGracePeriodSeconds": 2,
        "securityContext": {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "runAsNonRoot": True,
        },
        "containers": [container],
        "volumes": [
            {"name": "words", "configMap": {"name": "words"}},
            {"name": "key", "secret": {"secretName": "key", "defaultMode": 0o440}},
            {"name": "none", "secret": {"secretName": "none", "optional": True}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }
    template = {"metadata": {"labels": {"app": "made-up"}}, "spec": pod}
    return {"kind": "Job", "metadata": {"name": "made"}, "spec": {"template": template, **spec}}


def indexed(number: int, **more: Any) -> dict[str, Any]:
    return {"completionMode": "Indexed", "completions": number, "parallelism": number, **more}


def rule(action: str, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}


def started(made: Cluster, manifest: dict[str, Any]) -> Job:
    return Job(made, manifest, first_delay_seconds=0.1)


def ended(made: Cluster, manifest: dict[str, Any]) -> Job:
    running = started(made, manifest)
    running.run_to_end(seconds=30)
    return running


@contextmanager
def made_up(folder: Path):
    with cluster(folder, OBJECTS, addresses=3) as made:
        yield made


def last_log(made: Cluster) -> list[str]:
    return made.pods[-1].log.splitlines()


def test_variable_references_are_expanded():
    known = {"A": "1", "B.C": "2"}
    given = "$(A) $(B.C) $(D) $$(A) $$$(A) $A ${A} $(A"
    assert expanded(given, known) == "1 2 $(D) $(A) $1 $A ${A} $(A"


def test_a_container_runs_as_its_manifest_specifies(tmp_path):
    script = """
        printf '%s\\n' "$1" "$2" "$3" "$(id -u):$(id -g):$(id -G)" "$(pwd)" "$(hostname)"
        cat /etc/words/one.txt /etc/words/two /var/run/secrets/key/password; echo
        ls -A /var/run/secrets/none
        [ "$(hostname -i)" = "$ADDRESS" ] && ip -o -4 addr show eth0 | grep -c "$ADDRESS"
        for folder in / /etc /work /usr /etc/words /work/shared-to-read; do
            touch $folder/new 2>/dev/null && echo "$folder is writable"
        done
        echo from the pod > shared/file && touch /tmp/new && cat shared-to-read/file
        head -c 900000 /dev/zero > /dev/shm/less && echo fits
        head -c 9000000 /dev/zero 2>/dev/null > /dev/shm/more || echo full
        grep -E '^(CapBnd|CapEff|NoNewPrivs)' /proc/self/status
        ls /proc | grep -c '^[0-9]'
    """
    with made_up(tmp_path) as made:
        assert ended(made, job(script)).condition == "Complete", made.logs
        name = made.pods[0].name
        assert (tmp_path / "claims/shared/file").read_text() == "from the pod\n"
        lines = last_log(made)
    assert lines[:6] == ["hello $you", "$(GREETING)", "$(UNKNOWN)", "1000:1000:1000", "/work", name]
    assert lines[6:12] == ["firstsecondhush", "1", "from the pod", "fits", "full", lines[11]]
    assert [line.split()[1] for line in lines[11:14]] == ["0" * 16, "0" * 16, "1"]
    # The shell, ls and grep, but no processes of the host.
    assert lines[14] == "3"


@pytest.mark.parametrize("read_only", [True, False])
def test_a_read_only_root_is_read_only_for_root(read_only, tmp_path):
    manifest = job("touch /new && echo written; touch /usr/new /etc/words/new || true")
    pod = manifest["spec"]["template"]["spec"]
    del pod["securityContext"]
    pod["containers"][0]["securityContext"] = {"readOnlyRootFilesystem": read_only}
    with made_up(tmp_path) as made:
        assert ended(made, manifest).condition == "Complete", made.logs
        assert ("written" in last_log(made)) != read_only
        assert made.logs.count("Read-only file system") == (3 if read_only else 2)


def test_running_pods_are_removed_at_the_end(tmp_path):
    with made_up(tmp_path) as made:
        running = started(made, job("sleep 1000 & sleep 1001", **indexed(2)))

        def both_run() -> bool:
            return len(made.pods) == 2 and all(pod.first_process() for pod in made.pods)

        running.until(both_run, "process", seconds=30)
        firsts = [pod.first_process() for pod in made.pods]
    assert not [pid for pid in firsts if Path(f"/proc/{pid}").exists()]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_pods_resolve_each_other_by_index(tmp_path):
    """The pod with index 0 is reachable by its name in the headless Service."""
    script = """
        cd /tmp
        [ $JOB_COMPLETION_INDEX = 0 ] && exec python -c "
        import socket
        with socket.create_server(('made-0.team', 4000)) as server:
            print(server.accept()[0].recv(100).decode())
        "
        python -c "
        import os, socket, time
        while True:
            try:
                connection = socket.create_connection(('made-0.team', 4000))
                connection.sendall(os.uname().nodename.encode())
                break
            except OSError:
                time.sleep(0.1)
        "
    """.replace("\n        ", "\n")
    with made_up(tmp_path) as made:
        done = ended(made, job(script, **indexed(2)))
        assert done.condition == "Complete", made.logs
        assert done.pods[0][0].log == "made-1\n"


def test_pods_without_a_service_have_no_dns_names(tmp_path):
    script = "getent hosts made-1.team; getent hosts made-0 > /dev/null || exit 3"
    manifest = job(script, **indexed(2))
    manifest["spec"]["template"]["metadata"]["labels"] = {"app": "another"}
    with made_up(tmp_path) as made:
        done = ended(made, manifest | {"spec": manifest["spec"] | {"backoffLimit": 0}})
        assert [pod.log for pod in done.pods[0]] == [""], made.logs
        assert done.reason == "BackoffLimitExceeded"  # made-1 cannot resolve made-0 either


def test_a_failed_init_container_ends_the_pod(tmp_path):
    manifest = job("echo main")
    pod = manifest["spec"]["template"]["spec"]
    (main,) = pod["containers"]
    first = main | {"name": "first", "command": ["sh", "-c", "echo first > /dev/shm/a"]}
    second = main | {"name": "second", "command": ["sh", "-c", "cat /dev/shm/a; exit 7"]}
    pod["initContainers"] = [first, second]
    manifest["spec"]["podFailurePolicy"] = {"rules": [rule("FailJob", 7)]}
    with made_up(tmp_path) as made:
        done = ended(made, manifest)
        assert (done.condition, done.reason) == ("Failed", "PodFailurePolicy"), made.logs
        assert last_log(made) == ["first"]


@pytest.mark.parametrize(
    ("more", "script", "condition", "pods"),
    [
        ({}, "exit 0", "Complete", 1),
        ({"backoffLimit": 2}, "exit 1", "Failed BackoffLimitExceeded", 3),
        (
            {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule("Ignore", 75)]}},
            "[ -e shared/ran ] || { touch shared/ran; exit 75; }",
            "Complete",
            2,
        ),
        (
            {"podFailurePolicy": {"rules": [rule("Ignore", 75), rule("FailJob", 2, 130)]}},
            "exit 130",
            "Failed PodFailurePolicy",
            1,
        ),
        (
            indexed(2, backoffLimitPerIndex=1),
            "exit $JOB_COMPLETION_INDEX",
            "Failed FailedIndexes",
            3,
        ),
        (
            indexed(2, backoffLimitPerIndex=0, maxFailedIndexes=0),
            "[ $JOB_COMPLETION_INDEX = 0 ] && exit 1; sleep 1000",
            "Failed MaxFailedIndexesExceeded",
            2,
        ),
    ],
)
def test_exit_codes_and_limits_determine_the_result_of_a_job(
    more, script, condition, pods, tmp_path
):
    with made_up(tmp_path) as made:
        done = ended(made, job(script, **more))
        assert " ".join((done.condition, done.reason)).strip() == condition, made.logs
        assert len(made.pods) == pods


def test_a_failed_job_stops_its_other_pods(tmp_path):
    script = """
        trap 'echo stopping; exit 75' TERM
        [ $JOB_COMPLETION_INDEX = 1 ] && { until [ -e shared/ready ]; do sleep 0.1; done; exit 2; }
        touch shared/ready; while :; do sleep 0.1; done
    """
    policy = {"rules": [rule("FailJob", 2)]}
    with made_up(tmp_path) as made:
        done = ended(made, job(script, **indexed(2, podFailurePolicy=policy)))
        assert done.reason == "PodFailurePolicy", made.logs
        assert [pod.exit_code for pod in made.pods] == [75, 2]
        assert made.pods[0].log == "stopping\n"


def test_a_killed_pod_counts_as_a_failure_and_its_replacement_has_a_new_address(tmp_path):
    script = (
        "echo $ADDRESS; [ -e shared/again ] || { touch shared/again; sleep 1000 & sleep 1001; }"
    )
    with made_up(tmp_path) as made:
        running = started(made, job(script, **indexed(1)))
        marker = tmp_path / "claims/shared/again"
        running.until(marker.exists, "first pod", seconds=30)
        (pod,) = made.pods
        pod.kill()
        running.run_to_end(seconds=30)
        assert running.condition == "Complete", made.logs
        assert running.verdicts == [(pod.name, "Count")]
        assert [each.exit_code for each in running.pods[0]] == [137, 0]
        first, second = (each.log.splitlines()[0] for each in running.pods[0])
        assert first != second
        assert {each.host_name for each in running.pods[0]} == {"made-0"}


DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


@pytest.mark.parametrize("policy", ["Failed", "TerminatingOrFailed"])
def test_an_evicted_pod_gets_its_grace_period_and_does_not_count_as_a_failure(policy, tmp_path):
    """The pod ignores the signal and is killed. With policy Failed, a replacement waits for it."""
    script = """
        [ -e shared/again ] && exit
        trap 'touch shared/signaled' TERM; touch shared/again; while :; do sleep 0.1; done
    """
    more = {"podReplacementPolicy": policy, "podFailurePolicy": {"rules": [DISRUPTED]}}
    manifest = job(script, **indexed(1, parallelism=2, backoffLimit=0, **more))
    with made_up(tmp_path) as made:
        running = started(made, manifest)
        running.until((tmp_path / "claims/shared/again").exists, "first pod", seconds=30)
        made.pods[0].evict()
        running.until(lambda: len(made.pods) == 2, "new pod", seconds=30)
        assert (made.pods[0].exit_code is None) == (policy == "TerminatingOrFailed")
        running.run_to_end(seconds=30)
        assert running.condition == "Complete", made.logs
        assert (tmp_path / "claims/shared/signaled").exists()


def test_unsupported_fields_are_rejected(tmp_path):
    with made_up(tmp_path) as made:
        manifest = job("exit 0")
        manifest["spec"]["template"]["spec"]["hostNetwork"] = True
        with pytest.raises(AssertionError, match=r"not emulated: {'hostNetwork'}"):
            ended(made, manifest)
        with pytest.raises(AssertionError, match=r"not emulated: {'suspend'}"):
            Job(made, job("exit 0", suspend=True))

"""The fields that we use of custom resources, closed: any other is a mistake. With their defaults,
and with what the resource's own rules or its operator refuse, as rules in CEL.

Written by hand from the API references:
- JobSet jobset.x-k8s.io/v1alpha2: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2
- TrainJob, TrainingRuntime trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2.3: kubeflow.org,
  Trainer, operator guides (runtime, ML policy, runtime patches)
- RayService ray.io/v1, KubeRay 1.6 and 1.7: docs.ray.io/en/master/kuberay/references/api.html
"""

from typing import Any

from tests.k8s.cel_rules import ruled

_NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
_COUNT = {"type": "integer", "minimum": 0}
_FLAG = {"type": "boolean"}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
# What is inside is checked as a Job's or a pod's own.
_INSIDE = {"type": "object"}


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _kind(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _closed("name", name=_NAME, namespace=_NAME, labels=_STRINGS, annotations=_STRINGS)
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_FAILURE_RULE = _closed(
    "name action",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={
        "type": "array",
        "items": {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        },
    },
)

_REPLICATED_JOBS = ruled(
    {
        "type": "array",
        "minItems": 1,
        "items": _closed(
            "name template",
            name=_NAME,
            replicas={**_COUNT, "default": 1},
            template=_INSIDE,
            dependsOn={
                "type": "array",
                "items": _closed("name status", name=_NAME, status={"enum": ["Ready", "Complete"]}),
            },
        ),
    },
    ("self.all(a, self.exists_one(b, b.name == a.name))", "two replicated jobs of one name"),
    ("!has(self[0].dependsOn)", "the first replicated job depends on none"),
)

_JOB_SET = ruled(
    _closed(
        "replicatedJobs",
        suspend=_FLAG,
        network=_closed(enableDNSHostnames=_FLAG, subdomain=_NAME, publishNotReadyAddresses=_FLAG),
        startupPolicy=_closed(
            "startupPolicyOrder", startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}
        ),
        failurePolicy=_closed(
            maxRestarts={**_COUNT, "default": 0},
            rules={"type": "array", "items": _FAILURE_RULE, "maxItems": 20},
        ),
        replicatedJobs=_REPLICATED_JOBS,
    ),
    (
        "!has(self.startupPolicy) || self.startupPolicy.startupPolicyOrder != 'InOrder' || "
        "!self.replicatedJobs.exists(job, has(job.dependsOn))",
        "jobs start in order or by what they depend on, not by both",
    ),
)

_TRAIN_JOB = _closed(
    "runtimeRef",
    suspend=_FLAG,
    runtimeRef=_closed(
        "name",
        apiGroup={"const": "trainer.kubeflow.org", "default": "trainer.kubeflow.org"},
        kind={
            "enum": ["TrainingRuntime", "ClusterTrainingRuntime"],
            "default": "ClusterTrainingRuntime",
        },
        name=_NAME,
    ),
    trainer=_closed(numNodes={"type": "integer", "minimum": 1}),
)

_TRAINING_RUNTIME = _closed(
    "template",
    mlPolicy=ruled(
        _closed(
            numNodes={"type": "integer", "minimum": 1},
            torch=_closed(elasticPolicy=_INSIDE),
            mpi=_INSIDE,
        ),
        (
            "!(has(self.numNodes) && has(self.torch) && has(self.torch.elasticPolicy))",
            "numNodes or torch.elasticPolicy, not both",
        ),
        ("!(has(self.torch) && has(self.mpi))", "torch or mpi, not both"),
    ),
    # The runtime names no size of its own: Trainer sets completions and parallelism.
    template=_closed("spec", spec=_JOB_SET),
)

_SECRET_KEY = _closed("name key", name=_NAME, key={"type": "string"})
_RESOURCES = _closed("requests limits", requests=_STRINGS, limits=_STRINGS)

_WORKER_GROUP = ruled(
    _closed(
        "groupName maxReplicas rayStartParams template",
        groupName=_NAME,
        replicas={**_COUNT, "default": 0},
        minReplicas={**_COUNT, "default": 0},
        maxReplicas={**_COUNT, "default": 2**31 - 1},
        rayStartParams=_STRINGS,
        template=_INSIDE,
    ),
    ("self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas"),
    (
        "self.minReplicas <= self.replicas && self.replicas <= self.maxReplicas",
        "replicas is not from minReplicas to maxReplicas",
    ),
)

_RAY_CLUSTER = _closed(
    "headGroupSpec",
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=_closed(mode={"enum": ["disabled", "token"]}, secretName=_NAME),
    gcsFaultToleranceOptions=_closed(
        "redisAddress",
        redisAddress={"type": "string", "pattern": r"^[^\s:]+:\d+$"},
        redisPassword=_closed(
            "valueFrom", valueFrom=_closed("secretKeyRef", secretKeyRef=_SECRET_KEY)
        ),
        externalStorageNamespace={"type": "string"},
    ),
    enableInTreeAutoscaling=_FLAG,
    autoscalerOptions=_closed(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=_COUNT,
        resources=_RESOURCES,
        securityContext=_INSIDE,
    ),
    headGroupSpec=_closed("rayStartParams template", rayStartParams=_STRINGS, template=_INSIDE),
    workerGroupSpecs=ruled(
        {"type": "array", "items": _WORKER_GROUP},
        ("self.all(a, self.exists_one(b, b.groupName == a.groupName))", "two groups of one name"),
    ),
)

SCHEMAS = {
    "JobSet": _kind("jobset.x-k8s.io/v1alpha2", "JobSet", _JOB_SET),
    "TrainJob": ruled(
        _kind("trainer.kubeflow.org/v1alpha1", "TrainJob", _TRAIN_JOB),
        # Its name becomes that of a Service.
        (
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name is not a name of RFC 1035",
        ),
    ),
    "TrainingRuntime": _kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", _TRAINING_RUNTIME),
    "RayService": _kind(
        "ray.io/v1",
        "RayService",
        _closed(
            "serveConfigV2 rayClusterConfig",
            serveConfigV2={"type": "string"},
            rayClusterConfig=_RAY_CLUSTER,
        ),
    ),
}

"""The fields that we use of custom resources, closed: any other is a mistake.

Written by hand from the API references:
- JobSet jobset.x-k8s.io/v1alpha2: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2
- TrainJob, TrainingRuntime trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2.3: kubeflow.org,
  Trainer, operator guides (runtime, ML policy, runtime patches)
- RayService ray.io/v1, KubeRay 1.6 and 1.7: docs.ray.io/en/master/kuberay/references/api.html
"""

from typing import Any

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

_JOB_SET = _closed(
    "replicatedJobs",
    suspend=_FLAG,
    network=_closed(enableDNSHostnames=_FLAG, subdomain=_NAME, publishNotReadyAddresses=_FLAG),
    failurePolicy=_closed(
        maxRestarts=_COUNT, rules={"type": "array", "items": _FAILURE_RULE, "maxItems": 20}
    ),
    replicatedJobs={
        "type": "array",
        "minItems": 1,
        "items": _closed("name template", name=_NAME, replicas=_COUNT, template=_INSIDE),
    },
)

_TRAIN_JOB = _closed(
    "runtimeRef",
    suspend=_FLAG,
    runtimeRef=_closed(
        "name",
        apiGroup={"const": "trainer.kubeflow.org"},
        kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
        name=_NAME,
    ),
    trainer=_closed(numNodes={"type": "integer", "minimum": 1}),
)

_TRAINING_RUNTIME = _closed(
    "template",
    mlPolicy=_closed(numNodes={"type": "integer", "minimum": 1}, torch=_closed()),
    # The runtime names no size of its own: Trainer sets completions and parallelism.
    template=_closed("spec", spec=_JOB_SET),
)

_SECRET_KEY = _closed("name key", name=_NAME, key={"type": "string"})
_RESOURCES = _closed("requests limits", requests=_STRINGS, limits=_STRINGS)

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
    workerGroupSpecs={
        "type": "array",
        "items": _closed(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=_NAME,
            replicas=_COUNT,
            minReplicas=_COUNT,
            maxReplicas=_COUNT,
            rayStartParams=_STRINGS,
            template=_INSIDE,
        ),
    },
)

SCHEMAS = {
    "JobSet": _kind("jobset.x-k8s.io/v1alpha2", "JobSet", _JOB_SET),
    "TrainJob": _kind("trainer.kubeflow.org/v1alpha1", "TrainJob", _TRAIN_JOB),
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

"""Schemas of custom resources: their fields, defaults, and rules in CEL.

Fields, types and required fields come from published models, except for RayService, KServe and the
Gateway API, whose schemas in crds/ are written by hand:

- JobSet, TrainJob, TrainingRuntime: from the models of the installed kubeflow-trainer-api
  (Apache-2.0), for its versions of Kubeflow Trainer and JobSet.
- PodMonitor, PrometheusRule: from the files in crds/, which state their origin.

These models do not contain the enumerations, defaults and rules of the CRDs. We add them below by
hand and in our own words, based on JobSet's api/jobset/v1alpha2/jobset_types.go at 816ba51e81df,
and Trainer's manifests/base/crds: trainjobs at 0f13bb7a0197 and trainingruntimes at 029b90c3d546.
Some limits are deliberately stricter than the published ones, because our manifests do not need
more.
"""

import copy
from pathlib import Path

import kubeflow_trainer_api.models as models
import yaml

from tests.k8s.cel_rules import Schema, rules
from tests.k8s.crds.gateways import GATEWAYS
from tests.k8s.crds.kserve import KSERVE
from tests.k8s.crds.of_models import spec_of
from tests.k8s.crds.parts import COUNT, NAME, SERVICE_NAME, TEXT, resource
from tests.k8s.crds.rayservices import RAY_SERVICE

_DURATION: Schema = {"pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "minLength": 2}


def limited(published: Schema, limits: dict[str, Schema]) -> Schema:
    """Add limits at paths such as `a.b[].c`. Raises KeyError for a path that does not exist."""
    schema = copy.deepcopy(published)
    for path, limit in limits.items():
        field = schema
        for name in path.replace("[]", ".[]").split(".") if path else ():
            field = field["items"] if name == "[]" else field["properties"][name]
        needed = {*field.get("required", ()), *limit.get("required", ())}
        field |= limit | ({"required": sorted(needed)} if needed else {})
    return schema


def _below(path: str, limits: dict[str, Schema]) -> dict[str, Schema]:
    return {f"{path}.{inner}".strip("."): limit for inner, limit in limits.items()}


_JOB_SET: dict[str, Schema] = {
    "": {
        "required": ["replicatedJobs"],
        **rules(
            (
                "!has(self.startupPolicy) || self.startupPolicy.startupPolicyOrder != 'InOrder' || "
                "!self.replicatedJobs.exists(job, has(job.dependsOn))",
                "startupPolicyOrder InOrder and dependsOn are mutually exclusive",
            )
        ),
    },
    "network.subdomain": NAME,
    "ttlSecondsAfterFinished": COUNT,
    "startupPolicy.startupPolicyOrder": {"enum": ["AnyOrder", "InOrder"]},
    "successPolicy.operator": {"enum": ["All", "Any"]},
    "failurePolicy.maxRestarts": COUNT,
    "failurePolicy.restartStrategy": {
        "enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"],
        "default": "Recreate",
    },
    "failurePolicy.rules": {"maxItems": 20},
    "failurePolicy.rules[].name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    "failurePolicy.rules[].action": {
        "enum": [
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
            "RestartJob",
            "RestartJobAndIgnoreMaxRestarts",
        ]
    },
    "failurePolicy.rules[].onJobFailureReasons[]": {
        "enum": [
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    },
    "replicatedJobs": {
        "minItems": 1,
        **rules(
            (
                "self.all(a, self.exists_one(b, b.name == a.name))",
                "names of replicated jobs must be unique",
            ),
            ("!has(self[0].dependsOn)", "the first replicated job must not have dependsOn"),
        ),
    },
    "replicatedJobs[].name": NAME,
    "replicatedJobs[].groupName": {"default": "default"},
    "replicatedJobs[].replicas": {**COUNT, "default": 1},
    "replicatedJobs[].dependsOn": {"maxItems": 5},
    "replicatedJobs[].dependsOn[].name": NAME,
    "replicatedJobs[].dependsOn[].status": {"enum": ["Ready", "Complete"]},
}

_TRAIN_JOB: dict[str, Schema] = {
    "suspend": {"default": False},
    "activeDeadlineSeconds": {"minimum": 1},
    "managedBy": {
        "enum": ["trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"],
        "default": "trainer.kubeflow.org/trainjob-controller",
    },
    "runtimeRef.name": NAME,
    "runtimeRef.apiGroup": {"const": "trainer.kubeflow.org", "default": "trainer.kubeflow.org"},
    "runtimeRef.kind": {
        "enum": ["TrainingRuntime", "ClusterTrainingRuntime"],
        "default": "ClusterTrainingRuntime",
    },
    "runtimePatches": {"maxItems": 16},
    "trainer.numNodes": {"minimum": 1},
    "trainer.numProcPerNode": {"minimum": 1},
}

_TRAINING_RUNTIME: dict[str, Schema] = {
    "": {"required": ["template"]},
    "mlPolicy": rules(
        (
            "(has(self.torch) ? 1 : 0) + (has(self.mpi) ? 1 : 0) + (has(self.jax) ? 1 : 0) <= 1",
            "only one of torch, mpi and jax may be set",
        )
    ),
    "mlPolicy.numNodes": {"minimum": 1},
    "template": {"required": ["spec"]},
    # The runtime does not set its size: Trainer sets completions and parallelism.
    **_below("template.spec", _JOB_SET),
}

_POD_MONITOR: dict[str, Schema] = {
    "": {"required": ["podMetricsEndpoints"]},
    "jobLabel": TEXT,
    "podMetricsEndpoints": {"minItems": 1},
    "podMetricsEndpoints[]": {"required": ["port"]},
    "podMetricsEndpoints[].port": TEXT,
    "podMetricsEndpoints[].path": TEXT,
    "podMetricsEndpoints[].interval": _DURATION,
    "podMetricsEndpoints[].authorization": {"required": ["credentials"]},
    "podMetricsEndpoints[].authorization.type": TEXT,
    "podMetricsEndpoints[].authorization.credentials": {"required": ["name"]},
    "podMetricsEndpoints[].authorization.credentials.name": TEXT,
    "podMetricsEndpoints[].authorization.credentials.key": TEXT,
    "selector.matchExpressions[].key": TEXT,
    "selector.matchExpressions[].operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    "selector.matchExpressions[].values": {"minItems": 1},
}

_RULE = "groups[].rules[]"
_PROMETHEUS_RULE: dict[str, Schema] = {
    "": {"required": ["groups"]},
    "groups": {"minItems": 1},
    "groups[]": {"required": ["rules"]},
    "groups[].interval": _DURATION,
    "groups[].rules": {"minItems": 1},
    # All of our rules are alerts with annotations.
    _RULE: {"required": ["alert", "labels", "annotations"]},
    f"{_RULE}.alert": TEXT,
    f"{_RULE}.expr": TEXT,
    f"{_RULE}.for": _DURATION,
}


def _file(name: str) -> Schema:
    spec: Schema = yaml.safe_load((Path(__file__).parent / f"crds/{name}.yaml").read_text())
    return spec


def _trainer(kind: str, spec: Schema, *own_rules: tuple[str, str]) -> Schema:
    return resource("trainer.kubeflow.org/v1alpha1", kind, spec, *own_rules)


def _prometheus(kind: str, spec: Schema) -> Schema:
    return resource("monitoring.coreos.com/v1", kind, spec)


SCHEMAS = {
    "JobSet": resource(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        limited(spec_of(models.JobsetV1alpha2JobSet), _JOB_SET),
    ),
    "TrainJob": _trainer(
        "TrainJob",
        limited(spec_of(models.TrainerV1alpha1TrainJob), _TRAIN_JOB),
        SERVICE_NAME,
    ),
    "TrainingRuntime": _trainer(
        "TrainingRuntime",
        limited(spec_of(models.TrainerV1alpha1TrainingRuntime), _TRAINING_RUNTIME),
    ),
    "RayService": RAY_SERVICE,
    **GATEWAYS,
    **KSERVE,
    "PodMonitor": _prometheus("PodMonitor", limited(_file("podmonitors"), _POD_MONITOR)),
    "PrometheusRule": _prometheus(
        "PrometheusRule", limited(_file("prometheusrules"), _PROMETHEUS_RULE)
    ),
}

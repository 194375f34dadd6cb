"""RayService (ray.io/v1), by hand and closed to the fields that we use: no package has its schema.

In words of our own, from docs.ray.io/en/master/kuberay/references/api.html, and compared with what
KubeRay publishes: helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml at 02a80a6f2abf, a
raycluster_types.go of about that time, and what the operator itself refuses, in
ray-operator/controllers/ray/utils/validation.go at 0074504f84f2. Narrower on purpose: a cluster has
workers, Redis keeps the GCS with a password from a Secret, groups differ by name, and replicas are
between their bounds, of which the CRD says nothing.
"""

from tests.k8s.cel_rules import rules
from tests.k8s.crds.parts import (
    COUNT,
    FLAG,
    INSIDE,
    NAME,
    NAME_OF_A_SERVICE,
    STRINGS,
    closed,
    resource,
)

_SECRET_KEY = closed("name key", name=NAME, key={"type": "string"})
_RESOURCES = closed("requests limits", requests=STRINGS, limits=STRINGS)

_WORKER_GROUP = {
    **closed(
        "groupName maxReplicas template",
        groupName=NAME,
        replicas={**COUNT, "default": 0},
        minReplicas={**COUNT, "default": 0},
        maxReplicas={**COUNT, "default": 2**31 - 1},
        rayStartParams=STRINGS,
        template=INSIDE,
    ),
    **rules(
        ("self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas"),
        (
            "self.minReplicas <= self.replicas && self.replicas <= self.maxReplicas",
            "replicas is not from minReplicas to maxReplicas",
        ),
    ),
}

# What the operator says of a cluster that the API server took: such a service never starts.
_BY_KUBERAY = rules(
    (
        "!has(self.authOptions) || "
        "(has(self.authOptions.mode) && self.authOptions.mode == 'disabled') || "
        "(has(self.rayVersion) && self.rayVersion.matches("
        "'^(2[.](5[2-9]|[6-9][0-9]|[1-9][0-9]{2,})[.]|([3-9]|[1-9][0-9]+)[.])'))",
        "authOptions take a rayVersion of 2.52 or later",
    ),
    (
        "!has(self.gcsFaultToleranceOptions) || "
        "!self.headGroupSpec.template.spec.containers.exists(container, has(container.env) && "
        "container.env.exists(given, given.name in "
        "['REDIS_PASSWORD', 'RAY_REDIS_ADDRESS', 'REDIS_USERNAME']))",
        "gcsFaultToleranceOptions say where Redis is, not the head's environment",
    ),
    (
        "!(has(self.enableInTreeAutoscaling) && self.enableInTreeAutoscaling) || "
        "([self.headGroupSpec] + self.workerGroupSpecs).all(group, "
        "!has(group.template.spec.restartPolicy) || group.template.spec.restartPolicy == 'Never')",
        "restartPolicy is Never where Ray scales the cluster",
    ),
)

_RAY_CLUSTER = {
    **closed(
        "headGroupSpec workerGroupSpecs",
        rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        authOptions=closed(mode={"enum": ["disabled", "token"]}, secretName=NAME),
        gcsFaultToleranceOptions=closed(
            "redisAddress",
            redisAddress={"type": "string", "pattern": r"^[^\s:]+:\d+$"},
            redisPassword=closed(
                "valueFrom", valueFrom=closed("secretKeyRef", secretKeyRef=_SECRET_KEY)
            ),
            externalStorageNamespace={"type": "string"},
        ),
        enableInTreeAutoscaling=FLAG,
        autoscalerOptions=closed(
            version={"enum": ["v1", "v2"]},
            idleTimeoutSeconds=COUNT,
            resources=_RESOURCES,
            securityContext=INSIDE,
        ),
        headGroupSpec=closed("template", rayStartParams=STRINGS, template=INSIDE),
        workerGroupSpecs={
            "type": "array",
            "items": _WORKER_GROUP,
            **rules(
                (
                    "self.all(a, self.exists_one(b, b.groupName == a.groupName))",
                    "two groups of one name",
                )
            ),
        },
    ),
    **_BY_KUBERAY,
}

_SPEC = closed(
    "serveConfigV2 rayClusterConfig",
    serveConfigV2={"type": "string"},
    rayClusterConfig=_RAY_CLUSTER,
)

RAY_SERVICE = resource(
    "ray.io/v1",
    "RayService",
    _SPEC,
    NAME_OF_A_SERVICE,
    # KubeRay makes of it the names of a cluster and of Services: 16 characters more.
    ("size(self.metadata.name) <= 47", "metadata.name is longer than 47 characters"),
)

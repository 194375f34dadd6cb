"""Schema of RayService (ray.io/v1), written by hand because no package contains it.

It contains only the fields that we use, in our own words. It is based on
docs.ray.io/en/master/kuberay/references/api.html and was compared with KubeRay:
helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml at 02a80a6f2abf, raycluster_types.go from
about the same time, and the operator's own checks in
ray-operator/controllers/ray/utils/validation.go at 0074504f84f2. `upgradeStrategy` was compared
with rayservice_types.go and validation.go at feeaf72facab, after KubeRay 1.7. It is deliberately
stricter than the CRD: a cluster has workers, Redis stores the GCS with a password from a Secret,
group names are unique, and replicas are between their bounds.
"""

from tests.k8s.cel_rules import rules
from tests.k8s.crds.parts import (
    COUNT,
    FLAG,
    INSIDE,
    NAME,
    SERVICE_NAME,
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

# The API server accepts clusters that violate these rules, but the operator never starts them.
_OPERATOR_RULES = rules(
    (
        "!has(self.authOptions) || "
        "(has(self.authOptions.mode) && self.authOptions.mode == 'disabled') || "
        "(has(self.rayVersion) && self.rayVersion.matches("
        "'^(2[.](5[2-9]|[6-9][0-9]|[1-9][0-9]{2,})[.]|([3-9]|[1-9][0-9]+)[.])'))",
        "authOptions requires rayVersion 2.52 or later",
    ),
    (
        "!has(self.gcsFaultToleranceOptions) || "
        "!self.headGroupSpec.template.spec.containers.exists(container, has(container.env) && "
        "container.env.exists(given, given.name in "
        "['REDIS_PASSWORD', 'RAY_REDIS_ADDRESS', 'REDIS_USERNAME']))",
        "set the address of Redis in gcsFaultToleranceOptions, not in the environment of the head",
    ),
    (
        "!(has(self.enableInTreeAutoscaling) && self.enableInTreeAutoscaling) || "
        "([self.headGroupSpec] + self.workerGroupSpecs).all(group, "
        "!has(group.template.spec.restartPolicy) || group.template.spec.restartPolicy == 'Never')",
        "restartPolicy must be Never if enableInTreeAutoscaling is true",
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
                    "names of worker groups must be unique",
                )
            ),
        },
    ),
    **_OPERATOR_RULES,
}

_PERCENT = {"type": "integer", "minimum": 0, "maximum": 100}
_INCREMENTAL = "NewClusterWithIncrementalUpgrade"
_UPGRADE = {
    **closed(
        "type",
        type={"enum": ["None", "NewCluster", _INCREMENTAL]},
        clusterUpgradeOptions={
            **closed(
                "gatewayClassName stepSizePercent intervalSeconds",
                gatewayClassName=NAME,
                maxSurgePercent={**_PERCENT, "default": 100},
                stepSizePercent=_PERCENT,
                intervalSeconds={"type": "integer", "minimum": 1},
            ),
            **rules(
                (
                    "self.stepSizePercent <= self.maxSurgePercent",
                    "stepSizePercent is above maxSurgePercent",
                )
            ),
        },
    ),
    **rules(
        (
            f"(self.type == '{_INCREMENTAL}') == has(self.clusterUpgradeOptions)",
            f"clusterUpgradeOptions are required for {_INCREMENTAL}, and only for it",
        )
    ),
}

_SPEC = {
    **closed(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2={"type": "string"},
        rayClusterConfig=_RAY_CLUSTER,
        upgradeStrategy=_UPGRADE,
    ),
    **rules(
        (
            f"!has(self.upgradeStrategy) || self.upgradeStrategy.type != '{_INCREMENTAL}' || "
            "(has(self.rayClusterConfig.enableInTreeAutoscaling) && "
            "self.rayClusterConfig.enableInTreeAutoscaling)",
            f"{_INCREMENTAL} requires enableInTreeAutoscaling",
        )
    ),
}

RAY_SERVICE = resource(
    "ray.io/v1",
    "RayService",
    _SPEC,
    SERVICE_NAME,
    # KubeRay appends up to 16 characters to it for the names of the cluster and of Services.
    ("size(self.metadata.name) <= 47", "metadata.name is longer than 47 characters"),
)

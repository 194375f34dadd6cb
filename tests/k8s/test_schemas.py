"""The schemas of custom resources: the published fields, and the limits added to them."""

from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models
import pytest
from pydantic import BaseModel, Field

from tests.k8s.built import built, needs_kustomize, one, schema_errors, set_at
from tests.k8s.cel_rules import defaulted
from tests.k8s.crds.of_models import spec_of
from tests.k8s.schemas import SCHEMAS, limited

RAY = "spec/rayClusterConfig"
HEAD = f"{RAY}/headGroupSpec/template/spec"
WORKER = f"{RAY}/workerGroupSpecs/0/template/spec"
TARGETS = [{"jobName": "node", "containerNames": ["exporter"]}]


class Inner(BaseModel):
    """A description, which is omitted from the schema."""

    size: int = Field(ge=1)


class Spec(BaseModel):
    inner: Inner | None = None
    word: str | None = Field(default=None, pattern="^(?i)(a|b)$")
    either: int | str = 1
    texts: dict[str, str] | None = None


class Model(BaseModel):
    spec: Spec
    status: Inner


def test_spec_of_returns_a_closed_schema_without_null_or_descriptions():
    size = {"type": "integer", "minimum": 1}
    inner = {"type": "object", "properties": {"size": size}, "required": ["size"]}
    assert spec_of(Model) == {
        "type": "object",
        "properties": {
            "inner": {**inner, "additionalProperties": False},
            "word": {"type": "string", "pattern": "(?i)^(a|b)$"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 1},
            "texts": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "additionalProperties": False,
    }


def changed(folder: str, kind: str, path: str, value: Any) -> dict[str, Any]:
    manifest = one(built(folder), kind)
    set_at(manifest, path, value)
    return manifest


@needs_kustomize
@pytest.mark.parametrize(
    ("folder", "kind", "path", "value"),
    [
        ("overlays/jobset", "JobSet", "spec/successPolicy", {"operator": "Any"}),
        ("overlays/jobset", "JobSet", "spec/failurePolicy/restartStrategy", "InPlaceRestart"),
        ("overlays/trainjob", "TrainJob", "spec/activeDeadlineSeconds", 60),
        (
            "overlays/trainjob",
            "TrainingRuntime",
            "spec/mlPolicy/torch/envInjection",
            {"targets": TARGETS},
        ),
        ("overlays/serving/rayservice", "RayService", f"{HEAD}/restartPolicy", "Never"),
    ],
)
def test_published_fields_that_we_do_not_use_are_accepted(folder, kind, path, value):
    assert list(schema_errors(changed(folder, kind, path, value))) == []


@needs_kustomize
@pytest.mark.parametrize(
    ("folder", "kind", "path", "value", "message"),
    [
        ("overlays/jobset", "JobSet", "spec/successPolicy", {"operator": "Some"}, "not one of"),
        ("overlays/jobset", "JobSet", "spec/successPolicy", {}, "'operator' is a required"),
        ("overlays/jobset", "JobSet", "spec/failurePolicy/restartStrategy", "Fast", "not one of"),
        ("overlays/jobset", "JobSet", "spec/ttlSecondsAfterFinished", -1, "less than the minimum"),
        ("overlays/trainjob", "TrainJob", "spec/activeDeadlineSeconds", 0, "less than the minimum"),
        ("overlays/trainjob", "TrainJob", "spec/managedBy", "kueue", "not one of"),
        ("overlays/trainjob", "TrainJob", "spec/trainer/numProcPerNode", "auto", "not of type"),
        ("overlays/trainjob", "TrainingRuntime", "spec/mlPolicy/jax", {}, "only one of torch"),
        (
            "overlays/trainjob",
            "TrainingRuntime",
            "spec/template/spec/startupPolicy",
            {"startupPolicyOrder": "Any"},
            "not one of",
        ),
        # KubeRay rejects these, but the API server would accept them.
        ("overlays/serving/rayservice", "RayService", "metadata/name", "1st", "RFC 1035"),
        ("overlays/serving/rayservice", "RayService", "metadata/name", "k" * 48, "longer than 47"),
        (
            "overlays/serving/rayservice",
            "RayService",
            f"{RAY}/rayVersion",
            "2.51.1",
            "2.52 or later",
        ),
        ("overlays/serving/rayservice", "RayService", f"{RAY}/rayVersion", None, "2.52 or later"),
        (
            "overlays/serving/rayservice",
            "RayService",
            f"{HEAD}/restartPolicy",
            "Always",
            "must be Never",
        ),
        (
            "overlays/serving/rayservice",
            "RayService",
            f"{WORKER}/restartPolicy",
            "OnFailure",
            "must be Never",
        ),
        (
            "overlays/serving/rayservice",
            "RayService",
            f"{HEAD}/containers/0/env",
            [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
            "gcsFaultToleranceOptions",
        ),
    ],
)
def test_a_limit_rejects_an_invalid_value(folder, kind, path, value, message):
    lines = list(schema_errors(changed(folder, kind, path, value)))
    assert any(message in line for line in lines), lines


@needs_kustomize
def test_null_is_not_a_valid_value():
    job_set = one(built("overlays/jobset"), "JobSet")
    job_set["spec"]["suspend"] = None
    assert any("None is not of type 'boolean'" in line for line in schema_errors(job_set))


@needs_kustomize
def test_the_defaults_of_the_crds_are_set():
    train_job = defaulted(SCHEMAS["TrainJob"], one(built("overlays/trainjob"), "TrainJob"))
    assert train_job["spec"]["suspend"] is False
    assert train_job["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller"
    job_set = defaulted(SCHEMAS["JobSet"], one(built("overlays/jobset"), "JobSet"))
    assert job_set["spec"]["failurePolicy"]["restartStrategy"] == "Recreate"
    assert job_set["spec"]["replicatedJobs"][0]["groupName"] == "default"


def test_a_limit_on_an_unknown_field_raises():
    published = spec_of(models.TrainerV1alpha1TrainingRuntime)
    with pytest.raises(KeyError, match="elasticPolicy"):
        limited(published, {"mlPolicy.torch.elasticPolicy": {"type": "object"}})


def test_limits_extend_required_fields_and_do_not_change_the_input():
    published = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    assert limited(published, {"": {"required": ["b"]}})["required"] == ["a", "b"]
    assert published["required"] == ["a"]


def test_every_schema_file_states_its_origin():
    files = sorted((Path(__file__).parent / "crds").glob("*.yaml"))
    assert [path.stem for path in files] == ["podmonitors", "prometheusrules"]
    for path in files:
        text = path.read_text()
        for word in ("# Origin: ", "# Version: ", "# License: Apache-2.0", "# Pruned: "):
            assert word in text, (path.name, word)

"""The schemas of custom resources: what is published, and what we and the operators add to it."""

from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models
import pytest
from pydantic import BaseModel, Field

from tests.k8s.built import built, needs_kustomize, one, refusals, set_at
from tests.k8s.cel_rules import defaulted
from tests.k8s.crds.of_models import spec_of
from tests.k8s.schemas import SCHEMAS, limited

RAY = "spec/rayClusterConfig"
HEAD = f"{RAY}/headGroupSpec/template/spec"
WORKER = f"{RAY}/workerGroupSpecs/0/template/spec"
TARGETS = [{"jobName": "node", "containerNames": ["exporter"]}]


class Inner(BaseModel):
    """Told of to nobody."""

    size: int = Field(ge=1)


class Spec(BaseModel):
    inner: Inner | None = None
    word: str | None = Field(default=None, pattern="^(?i)(a|b)$")
    either: int | str = 1
    texts: dict[str, str] | None = None


class Model(BaseModel):
    spec: Spec
    status: Inner


def test_a_model_becomes_a_closed_schema_without_null_and_descriptions():
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
        ("overlays/serving", "RayService", f"{HEAD}/restartPolicy", "Never"),
    ],
)
def test_what_is_published_is_taken_though_we_do_not_use_it(folder, kind, path, value):
    assert list(refusals(changed(folder, kind, path, value))) == []


@needs_kustomize
@pytest.mark.parametrize(
    ("folder", "kind", "path", "value", "said"),
    [
        ("overlays/jobset", "JobSet", "spec/successPolicy", {"operator": "Some"}, "not one of"),
        ("overlays/jobset", "JobSet", "spec/successPolicy", {}, "'operator' is a required"),
        ("overlays/jobset", "JobSet", "spec/failurePolicy/restartStrategy", "Fast", "not one of"),
        ("overlays/jobset", "JobSet", "spec/ttlSecondsAfterFinished", -1, "less than the minimum"),
        ("overlays/trainjob", "TrainJob", "spec/activeDeadlineSeconds", 0, "less than the minimum"),
        ("overlays/trainjob", "TrainJob", "spec/managedBy", "kueue", "not one of"),
        ("overlays/trainjob", "TrainJob", "spec/trainer/numProcPerNode", "auto", "not of type"),
        ("overlays/trainjob", "TrainingRuntime", "spec/mlPolicy/jax", {}, "torch or mpi or jax"),
        (
            "overlays/trainjob",
            "TrainingRuntime",
            "spec/template/spec/startupPolicy",
            {"startupPolicyOrder": "Any"},
            "not one of",
        ),
        # By KubeRay: the API server would take these.
        ("overlays/serving", "RayService", "metadata/name", "1st", "RFC 1035"),
        ("overlays/serving", "RayService", "metadata/name", "k" * 48, "longer than 47"),
        ("overlays/serving", "RayService", f"{RAY}/rayVersion", "2.51.1", "2.52 or later"),
        ("overlays/serving", "RayService", f"{RAY}/rayVersion", None, "2.52 or later"),
        ("overlays/serving", "RayService", f"{HEAD}/restartPolicy", "Always", "is Never"),
        ("overlays/serving", "RayService", f"{WORKER}/restartPolicy", "OnFailure", "is Never"),
        (
            "overlays/serving",
            "RayService",
            f"{HEAD}/containers/0/env",
            [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
            "where Redis is",
        ),
    ],
)
def test_a_limit_refuses(folder, kind, path, value, said):
    lines = list(refusals(changed(folder, kind, path, value)))
    assert any(said in line for line in lines), lines


@needs_kustomize
def test_null_is_no_value():
    job_set = one(built("overlays/jobset"), "JobSet")
    job_set["spec"]["suspend"] = None
    assert any("None is not of type 'boolean'" in line for line in refusals(job_set))


@needs_kustomize
def test_defaults_of_the_crds_are_filled_in():
    train_job = defaulted(SCHEMAS["TrainJob"], one(built("overlays/trainjob"), "TrainJob"))
    assert train_job["spec"]["suspend"] is False
    assert train_job["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller"
    job_set = defaulted(SCHEMAS["JobSet"], one(built("overlays/jobset"), "JobSet"))
    assert job_set["spec"]["failurePolicy"]["restartStrategy"] == "Recreate"
    assert job_set["spec"]["replicatedJobs"][0]["groupName"] == "default"


def test_a_limit_on_a_field_that_is_not_published_is_an_error():
    published = spec_of(models.TrainerV1alpha1TrainingRuntime)
    with pytest.raises(KeyError, match="elasticPolicy"):
        limited(published, {"mlPolicy.torch.elasticPolicy": {"type": "object"}})


def test_limits_add_to_what_is_needed_and_change_nothing_published():
    published = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    assert limited(published, {"": {"required": ["b"]}})["required"] == ["a", "b"]
    assert published["required"] == ["a"]


def test_every_file_says_where_it_is_from():
    files = sorted((Path(__file__).parent / "crds").glob("*.yaml"))
    assert [path.stem for path in files] == ["podmonitors", "prometheusrules"]
    for path in files:
        text = path.read_text()
        for word in ("# Origin: ", "# Version: ", "# Licence: Apache-2.0", "# Pruned: "):
            assert word in text, (path.name, word)

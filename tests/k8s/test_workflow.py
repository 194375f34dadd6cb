"""The workflow that serves a bundle on kind runs valid commands on objects that exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import ROOT, needs_kustomize, parameters, pods
from tests.k8s.test_render_serving import rendered

pytestmark = needs_kustomize
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/kind.yml").read_text())
SCRIPTS = [step["run"] for step in WORKFLOW["jobs"]["serve"]["steps"] if "run" in step]


def commands(start: str) -> list[list[str]]:
    """Return the words that follow `start` in each line that runs it, up to a redirection."""
    lines = [line for script in SCRIPTS for line in script.replace("\\\n", "").splitlines()]
    found = (line.strip().partition(start) for line in lines)
    return [
        shlex.split(rest.partition(" > ")[0]) for before, _, rest in found if rest and not before
    ]


def manifests() -> list[Any]:
    """Return the manifests that the workflow applies."""
    (line,) = commands(".venv/bin/kway k8s render ")
    assert line.pop(0) == "serving"
    given = parameters(["k8s", "render", "serving", *line])
    assert given["image"] == "kway-glyphs:1"
    assert given["replicas"] == "2"
    return rendered(
        bundle=Path("bundles/glyphs"),
        replicas=(2, 2),
        cpus=given["cpus"],
        memory=given["memory"],
        is_in_image=given["in_image"],
        has_grpc=given["grpc"],
    )


def test_kway_accepts_the_arguments():
    inside = commands("kway ")
    assert [line[0] for line in inside] == ["shard", "train", "eval", "export"]
    served = commands(".venv/bin/kway query ")
    for line in inside:
        assert parameters(line)
    for line in served:
        line.remove("$@")
        assert parameters(["query", *line, "--class", "#0"])
    assert len(served) == 2


def test_the_bundle_is_where_the_pods_read_it():
    (pod,) = pods(manifests())
    path = pod.containers[0]["args"][0]
    assert any(f"COPY . {path}\\n" in script for script in SCRIPTS)


def test_kubectl_uses_objects_that_are_applied():
    applied = {f"{m['kind'].lower()}/{m['metadata']['name']}" for m in manifests()}
    text = "\n".join(SCRIPTS)
    used = set(re.findall(r"\b(?:deployment|service)/[a-z-]+", text))
    assert used == {"deployment/kway-serve", "service/kway-serve"}
    assert used <= applied
    (pod,) = pods(manifests())
    key, value = re.search(r"--selector ([\w./-]+)=(\w+)", text).groups()
    assert pod.labels[key] == value

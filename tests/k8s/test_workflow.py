"""The workflow that serves a bundle on kind runs valid commands on objects that exist."""

import re
import shlex
from pathlib import Path

import yaml

from tests.k8s.manifests import ROOT, needs_kustomize, parameters, pods
from tests.k8s.test_render_serving import rendered

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/kind.yml").read_text())
SCRIPT = "\n".join(step.get("run", "") for step in WORKFLOW["jobs"]["serve"]["steps"])


@needs_kustomize
def test_the_commands_of_the_workflow_fit_the_rendered_manifests():
    lines = [line.strip() for line in SCRIPT.replace("\\\n", "").splitlines()]
    commands = [
        shlex.split(line.partition(" > ")[0].removeprefix(".venv/bin/").removeprefix("kway "))
        for line in lines
        if re.match(r"(\.venv/bin/)?kway \w", line) and '"$@"' not in line
    ]
    assert [line[0] for line in commands] == ["shard", "train", "eval", "export", "k8s"]
    *_, given = map(parameters, commands)
    manifests = rendered(
        bundle=Path(given["bundle"]),
        replicas=(int(given["replicas"]),) * 2,
        cpus=given["cpus"],
        memory=given["memory"],
        is_in_image=given["in_image"],
        has_grpc=given["grpc"],
    )
    applied = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in manifests}
    used = set(re.findall(r"\b(?:deployment|service)/[a-z-]+", SCRIPT))
    assert used == {"deployment/kway-serve", "service/kway-serve"}
    assert used <= applied
    (pod,) = pods(manifests)
    assert f"COPY . {pod.main['args'][0]}\\n" in SCRIPT
    key, value = re.search(r"--selector ([\w./-]+)=(\w+)", SCRIPT).groups()
    assert pod.labels[key] == value

"""Tests the built images as Kubernetes and `docker run` use them. Exits with 1 on failure."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tests.container.layers import Image, Mount
from tests.container.pod import Container, Running, of_manifest, probe_of_manifest

# Not in constraints.txt: pip's tools, and CUDA's libraries, whose versions torch pins.
_UNCONSTRAINED = ("kway", "setuptools", "nvidia-", "cuda-", "triton")
_LIST = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
"""
_TRY_TO_WRITE = "id && ! touch /etc/x && touch /tmp/x /work/runs/x && rm /work/runs/x"
_CLAIMS = ("shards", "runs", "bundles", "tokens", "recipe")


def check(image: Image, server: Image, work: Path, root: Path) -> None:
    """Run all checks in new folders below `work`. root: the folder of the checkout."""
    _create_folders(work, root)
    print("\n== tests as user 1000, read-only root, no capabilities, no network", flush=True)
    _report("versions", _versions(image, work, root))
    writes = (Mount(work / "runs", "/work/runs", read_only=False),)
    _report("user", Container(image, ("sh", "-ec", _TRY_TO_WRITE), writes).run(work))
    _report("kway", Container(image, (*image.entrypoint, *image.command)).run(work))
    _report("kway doctor", Container(image, ("kway", "doctor", "--run", "runs"), writes).run(work))
    _report(
        "shards", _pod(image, work, root, "base/shards", "shards", "--classes", "100").run(work)
    )
    for word in ("train", "evaluate", "export"):
        _report(word, _run_step(image, work, root, word))
    _serve(server, work)
    _ray_head(image, work, root)


def _report(what: str, printed: str, lines: int = 3) -> None:
    last = [line for line in printed.strip().splitlines() if line.strip()][-lines:]
    print(f"{what}:", *last, sep="\n    ", flush=True)


def _create_folders(work: Path, root: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    for name in _CLAIMS:
        (work / name).mkdir(parents=True)
        os.chown(work / name, 1000, 1000)
    shutil.copy(root / "k8s/base/training/recipe.yaml", work / "recipe")
    tokens = work / "tokens/tokens"
    tokens.write_text("a-token-only-for-this-test\n", encoding="utf-8")
    os.chown(tokens, 0, 1000)  # like a mounted Secret
    tokens.chmod(0o440)


def _versions(image: Image, work: Path, root: Path) -> str:
    found = json.loads(Container(image, ("python", "-I", "-c", _LIST)).run(work))
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    pinned = {_normalized(name): version for name, version in pairs}
    unexpected = {
        name: version
        for name, version in sorted(found.items())
        if pinned.get(_normalized(name)) != version.partition("+")[0]
        and not name.lower().startswith(_UNCONSTRAINED)
    }
    if unexpected:
        sys.exit(f"error: versions that differ from constraints.txt: {unexpected}")
    return f"{len(found)} packages, all with the versions in constraints.txt"


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pod(image: Image, work: Path, root: Path, part: str, name: str, *more: str) -> Container:
    settings = {"NUM_NODES": "1", "JOB_COMPLETION_INDEX": "0"}
    return of_manifest(image, root / f"k8s/{part}/job.yaml", name, work, settings, *more)


def _run_step(image: Image, work: Path, root: Path, name: str) -> str:
    if name != "train":
        return _pod(image, work, root, "base/export", name).run(work)
    short = ("train.device=cpu", "train.duration.steps=2", "checkpoint.every.steps=2")
    return _pod(image, work, root, "base/training", "train", *short).run(work)


def _serve(server: Image, work: Path) -> None:
    """Test the image's own command: the health check fails until it is up; SIGTERM stops it."""
    mounts = (
        Mount(work / "bundles/glyphs", "/work/bundle"),
        Mount(work / "tokens/tokens", "/run/secrets/tokens"),
    )
    words = (*server.entrypoint, *server.command)
    with Running(Container(server, words, mounts), work) as running:
        failures = running.wait_until(server.health, seconds=180)
        query = running.execute(["sh", "-ec", _QUERY])
        _report("health check", f"failed {failures} times during startup, then succeeded")
        if query.returncode != 0:
            sys.exit(f"{query.stdout}{query.stderr}\nerror: kway query failed")
        _report("kway query", query.stdout)
        code = running.stop()
        _report("kway serve", running.log.read_text(encoding="utf-8"))
    if code != 0:
        sys.exit(f"error: kway serve exited with {code} after SIGTERM")
    if not failures:
        sys.exit("error: the health check succeeded before the server can have started")


# The command draws its own input, because the container contains no image files.
_QUERY = """
python -I -c "from PIL import Image; Image.new('L', (32, 32)).save('/tmp/one.png')"
kway query http://127.0.0.1:8000 --token-file /run/secrets/tokens \
  --class "LATIN SMALL LETTER E" /tmp/one.png
"""


def _ray_head(image: Image, work: Path, root: Path) -> None:
    """Start the head of the RayService with KubeRay's command and test its startup probe."""
    manifest = root / "k8s/overlays/serving/rayservice/rayservice.yaml"
    spec = of_manifest(image, manifest, "ray-head", work, {})
    start = "ulimit -n 65536; ray start --head --block --dashboard-host=0.0.0.0 --num-cpus=0 \
--dashboard-agent-listen-port=52365 --metrics-export-port=8080"
    head = replace(spec, words=("/bin/bash", "-c", "--", start))
    with Running(head, work) as running:
        running.wait_until(probe_of_manifest(manifest, "ray-head", "startupProbe"), seconds=180)
        imported = running.execute(["python", "-c", "import serving.on_ray, ray.serve"])
        if imported.returncode != 0:
            sys.exit(f"{imported.stderr}\nerror: the application cannot be imported")
    _report("ray head", "the startup probe succeeded; serving.on_ray can be imported")

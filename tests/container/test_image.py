"""The Dockerfile: its base, the files that it copies, its packages, and its user."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.k8s.manifests import FOLDERS, built, needs_kustomize, pods

ROOT = Path(__file__).parents[2]
# Without comments and with continued lines joined.
_TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
LINES = [line for line in _TEXT.replace("\\\n", " ").splitlines() if line.strip()]
IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


def arguments() -> dict[str, str]:
    return dict(each.split("=", 1) for each in instructions("ARG") if "=" in each)


def is_copied(path: Path) -> bool:
    """Return whether `COPY . .` copies a file: the last rule in .dockerignore that matches it or a
    folder above it decides. `**/` at the start of a rule matches any folder."""
    names = [path, *path.parents][:-1]
    copied = True
    for rule in IGNORED:
        pattern = rule.lstrip("!")
        tried = [each.name if pattern.startswith("**/") else str(each) for each in names]
        depth = pattern.removeprefix("**/").count("/")
        pattern = pattern.removeprefix("**/")
        if any(fnmatch(each, pattern) and each.count("/") == depth for each in tried):
            copied = rule.startswith("!")
    return copied


def test_the_base_is_pinned_to_the_python_of_the_constraints():
    stages = [line.split() for line in instructions("FROM")]
    names = {stage[2] for stage in stages}
    bases = {base for base, _, _ in stages} - names - {"${VARIANT}"}
    assert bases == {"${DEBIAN}"}
    assert arguments()["DEBIAN"] == "debian:bookworm-slim"  # Debian 12, with Python 3.11
    assert (ROOT / "constraints.txt").read_text().startswith("# The exact versions that are tested")
    assert "on Python 3.11" in (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert {"cpu", "cu130"} <= names
    assert arguments()["TORCH_INDEX"].endswith("/${VARIANT}")


def test_every_copied_file_exists_and_is_in_the_context():
    copies = [line.split() for line in instructions("COPY") if "--from" not in line]
    named = [Path(source) for *sources, _ in copies for source in sources if source != "."]
    assert ["."] in [sources for *sources, _ in copies]
    assert named == [Path("constraints.txt"), Path("pyproject.toml")]
    tools = PROJECT["tool"]["setuptools"]
    packages = [pattern.removesuffix("*") for pattern in tools["packages"]["find"]["include"]]
    shipped = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    for package, patterns in tools["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        shipped += [path for pattern in patterns for path in folder.glob(pattern)]
    shipped += [ROOT / name for name in (*PROJECT["project"]["license-files"], "setup.py")]
    named += [path.relative_to(ROOT) for path in shipped]
    assert len(named) > 200
    assert [path for path in named if not (is_copied(path) and (ROOT / path).exists())] == []


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".venv/bin/python", "tests/data/test_mnist.py", "docs/demo.png", "tokens"),
        *("demo/queries/1.png", "runs/glyphs/log", "shards/a.tar", "data/__pycache__/a.pyc"),
    ],
)
def test_nothing_else_is_copied(path):
    assert not is_copied(Path(path))


@needs_kustomize
def test_the_user_the_folder_and_the_environment_are_those_of_the_manifests():
    users, environments = instructions("USER"), instructions("ENV")
    assert users == ["1000:1000"]
    for pod in (pod for folder in FOLDERS for pod in pods(built(folder))):
        if "redis" in pod.owner:
            continue
        security = pod.spec["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"]) == (1000, 1000)
        for container in pod.containers:
            assert container["workingDir"] == instructions("WORKDIR")[-1] == "/work"
            given = {entry["name"]: entry.get("value") for entry in container["env"]}
            for name in ("HOME", "USER"):
                assert f"{name}={given[name]}" in environments[-1].split()


def test_the_image_contains_what_the_manifests_run():
    extras = arguments()["EXTRAS"].split(",")
    assert set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    assert {"data", "train", "serve", "ray"} <= set(extras)


def test_the_health_check_asks_the_port_of_the_server():
    (check,), (port,) = instructions("HEALTHCHECK"), instructions("EXPOSE")
    assert f"'127.0.0.1', {port}," in check
    assert "'/health'" in check
    command = instructions("CMD")[-1]
    assert yaml.safe_load(command)[0] == "serve"
    assert "--port" not in command  # the check uses the default port


def test_every_package_is_installed_under_the_constraints():
    installs = re.findall(r"pip --python \S+ install ([^&\n]*)", "\n".join(LINES))
    assert len(installs) == 3
    for line in installs:
        kway_alone = "--no-deps" in line and line.rstrip().endswith(" .")
        assert "--constraint constraints.txt" in line or kway_alone, line


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_extras_install_from_the_constraints_in_a_clean_environment(tmp_path):
    def run(*command: object) -> None:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"]]
    for name in arguments()["EXTRAS"].split(","):
        needed += [each for each in extras[name] if not each.startswith("kway[")]
    (tmp_path / "requirements.txt").write_text("\n".join(needed))
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (tmp_path / "venv/bin/python", "-m", "pip")
    run(*pip, "install", "-c", ROOT / "constraints.txt", "-r", tmp_path / "requirements.txt")
    run(*pip, "check")

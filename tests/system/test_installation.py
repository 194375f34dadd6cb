"""Installations of kway: without extras, with one extra, from a wheel, and with files that shadow
its packages.

Environments contain links to the distributions that kway requires, directly or indirectly.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SITE = [sysconfig.get_paths()["purelib"]]
TRAIN_A_HEAD = """
import importlib.util
assert not any(map(importlib.util.find_spec, ("ray", "deepspeed")))
import torch
from heads import ClassHead, CrossEntropy
head = ClassHead(8, 1_000, CrossEntropy())
features, labels = torch.randn(64, 8), torch.randint(1_000, (64,))
optimizer = torch.optim.SGD(head.parameters(), lr=10.0)
losses = []
for _ in range(20):
    loss = head(features, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""


def required(of: Distribution, *extras: str) -> dict[str, Distribution]:
    """Return the distributions that `of` requires with `extras`, by name, excluding `of` itself."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()

    def add(owner: Distribution, extra: str) -> None:
        for requirement in map(Requirement, owner.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = requirement.name.lower()
            needed = of if name == of.name else distribution(name)
            if needed is not of:
                found[name] = needed
            for needed_extra in {"", *requirement.extras}:
                if (name, needed_extra) not in seen:
                    seen.add((name, needed_extra))
                    add(needed, needed_extra)

    for extra in ("", *extras):
        add(of, extra)
    return found


def top_level(of: Distribution) -> Iterator[Path]:
    folder = Path(str(of.locate_file("")))
    for name in {file.parts[0] for file in of.files or ()} - {"..", "__pycache__"}:
        yield folder / name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with kway and everything it requires without extras."""
    site = tmp_path_factory.mktemp("site")
    # A build may leave other metadata in the checkout.
    (kway,) = distributions(name="kway", path=SITE)
    paths = {path for item in required(kway).values() for path in top_level(item)}
    own = {ROOT / name for name in ("data", "heads", "trainer", "serving", "launch")}
    metadata = next(path for path in top_level(kway) if path.suffix == ".dist-info")
    for path in paths | own | {metadata}:
        (site / path.name).symlink_to(path)
    return site


def python(*arguments: str, packages: Path | str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_a_head_can_be_trained_without_extras(base: Path, tmp_path: Path) -> None:
    finished = python("-S", "-c", TRAIN_A_HEAD, packages=base, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_a_missing_extra_prints_a_one_line_error_with_the_install_command(
    base: Path, tmp_path: Path
) -> None:
    command = ("-S", "-P", "-m", "launch")
    assert python(*command, "query", "--help", packages=base, cwd=tmp_path).returncode == 0
    for arguments in (
        ("serve", "bundle", "--no-ray"),
        ("shard", "glyphs", "-o", "shards", "--classes", "10"),
    ):
        done = python(*command, *arguments, packages=base, cwd=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert line.startswith("error: the module ")
        assert f"is required but not installed: run pip install '{ROOT}[" in line
        assert ("serve" if arguments[0] == "serve" else f"{ROOT}[data]") in line
    assert list(tmp_path.iterdir()) == []


def test_hints_install_extras_from_the_file_that_kway_was_installed_from(
    base: Path, tmp_path: Path
) -> None:
    """Another project is called kway on the package index."""
    metadata, wheel = tmp_path / "kway-0.1.0.dist-info", tmp_path / "my wheels" / "kway.whl"
    (installed,) = base.glob("kway-*.dist-info")
    shutil.copytree(installed, metadata)
    (metadata / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
    wheel.parent.mkdir()
    code = "from data.extras import install_command; print(install_command('serve'))"

    def command() -> list[str]:
        done = python("-S", "-P", "-c", code, packages=f"{tmp_path}:{base}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout)

    wheel.touch()
    assert command() == ["pip", "install", f"{wheel}[serve]"]
    wheel.unlink()
    pip, install, *needed = command()
    assert (pip, install) == ("pip", "install")
    names = {Requirement(need).name for need in needed}
    assert names >= {"fastapi", "uvicorn", "webdataset"}
    assert "kway" not in names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of kway's wheel."""
    out = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, timeout=600)
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "site")
    return out / "site"


@pytest.mark.slow
def test_the_wheel_contains_the_packages_and_the_manifests(wheel: Path) -> None:
    names = {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"}
    assert names == {"data", "heads", "k8s", "launch", "serving", "trainer"}
    assert (wheel / "k8s/base/training/job.yaml").exists()
    assert (wheel / "launch/recipes/glyphs.yaml").exists()


@pytest.mark.parametrize("installed", ["editable", pytest.param("wheel", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shadow", "module"),
    [("data.py", "trainer"), ("serving", "launch")],
)
def test_a_file_that_shadows_a_package_is_reported(
    shadow: str,
    module: str,
    installed: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Installed packages take precedence over a folder without `__init__.py`, but editable installs
    do not."""
    path = tmp_path / shadow
    path.touch() if path.suffix else path.mkdir()
    packages = ROOT / "none" if installed == "editable" else request.getfixturevalue("wheel")
    done = python("-m", module, "--help", packages=packages, cwd=tmp_path)
    is_shadowed = path.suffix or installed == "editable"
    name = path.name.removesuffix(".py")
    error = (
        f"error: {path} shadows kway's package {name}: rename it or start Python with "
        "PYTHONSAFEPATH=1\n"
    )
    assert (done.returncode, done.stderr) == ((2, error) if is_shadowed else (0, ""))

"""The extra `train` is enough to train and `serve` is enough to serve.

Each test creates a virtual environment with links to those distributions in this environment that
the extra requires directly or indirectly.
"""

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from tests.serving.started import end, start
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.test_installation import ROOT, top_level
from tests.tiny_bundle import write

# Its metadata, and the folders that an installation links to.
Kway = tuple[Distribution, list[Path]]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with kway and one extra."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *arguments: object, cwd: Path) -> str:
        command = [self.python, "-P", *map(str, arguments)]
        finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished.stdout

    def finds(self, module: str) -> bool:
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
        return self.run("-c", code, cwd=self.folder) == "True\n"


def closure(of: Distribution, extras: set[str]) -> dict[str, Distribution]:
    """Return the distributions that `of` requires with `extras`, by name, excluding `of` itself."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()

    def add(owner: Distribution, extra: str) -> None:
        for requirement in map(Requirement, owner.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = requirement.name.lower()
            required = of if name == of.name else distribution(name)
            if required is not of:
                found[name] = required
            for required_extra in {"", *requirement.extras}:
                if (name, required_extra) not in seen:
                    seen.add((name, required_extra))
                    add(required, required_extra)

    for extra in {"", *extras}:
        add(of, extra)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Kway:
    """kway's metadata, and its packages as a wheel installs them."""
    out = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, timeout=600)
    (built,) = out.glob("*.whl")
    shutil.unpack_archive(built, out / "site", "zip")
    (metadata,) = distributions(name="kway", path=[str(out / "site")])
    return metadata, [*(out / "site").iterdir()]


@pytest.fixture
def create(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Kway], Environment]:
    """Create the environment of an extra."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)

    def environment(extra: str, kway: Kway) -> Environment:
        metadata, packages = kway
        folder = tmp_path_factory.mktemp(extra)
        venv.create(folder, with_pip=False, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        required = closure(metadata, {extra}).values()
        for path in {path for item in required for path in top_level(item)} | {*packages}:
            if path.name == "cv2":  # compares the entries of sys.path with its real path
                shutil.copytree(path, site / path.name)
            else:
                (site / path.name).symlink_to(path)
        return Environment(folder)

    return environment


def check_modules(environment: Environment, *, present: str, absent: str) -> None:
    assert environment.finds(present)
    assert not environment.finds(absent)


@pytest.mark.slow
def test_the_wheel_with_the_extra_train_can_train(
    create: Callable[[str, Kway], Environment], wheel: Kway, glyphs: Path, tmp_path: Path
) -> None:
    environment = create("train", wheel)
    check_modules(environment, present="deepspeed", absent="fastapi")
    environment.run("-m", "launch", "train", two_steps(glyphs, tmp_path), cwd=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def two_steps(glyphs: Path, folder: Path) -> Path:
    steps = {"train__duration": {"steps": 2}}
    return write_recipe(folder, glyph_recipe(glyphs, folder / "run", **steps))


@pytest.mark.slow
def test_the_wheel_with_the_extra_serve_can_serve(
    create: Callable[[str, Kway], Environment], wheel: Kway, tmp_path: Path
) -> None:
    environment = create("serve", wheel)
    check_modules(environment, present="uvicorn", absent="ray")
    launch = [environment.python, "-P", "-m", "launch"]
    bundle = write(tmp_path / "bundle")
    server = start(bundle, tmp_path / "errors", "--no-ray", start=launch, cwd=tmp_path)
    try:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}
    finally:
        assert end(server) == 0

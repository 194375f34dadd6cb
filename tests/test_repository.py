"""Rules for the repository: imports, module names, and no pickles."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from data.sources import SOURCES
from launch.commands import shard

ROOT = Path(__file__).parents[1]
FOLDERS = ("heads", "data", "trainer", "serving", "launch", "benchmarks", "experiments")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_has_a_command():
    commands = set(get_command(shard.app).list_commands(None))  # type: ignore[attr-defined]
    # `tweets` also reads a folder of labeled texts.
    sources = SOURCES.keys() - {"labelled-texts"}
    assert commands - {"check", "index", "show", "verify"} == sources


def test_modules_are_named_for_their_content():
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [relative(p) for p in [*MODULES, *TESTS] if vague & set(p.with_suffix("").parts)] == []


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        # Keeps `kway --help` fast, and lets `kway doctor` run even if torch is broken.
        (
            "serving.config, launch.main",
            ("torch", "transformers", "ray", "cv2", "deepspeed", "matplotlib"),
        ),
        # Keeps Ray's gRPC proxies, which import the servicer, small.
        ("serving.inference.servicer", ("torch",)),
        # Keeps the start of a rank fast: a run with a backbone of transformers imports it, and
        # scipy with it, when the backbone is built.
        ("trainer.train", ("transformers", "scipy", "httpx", "deepspeed")),
    ],
)
def test_a_command_imports_only_what_it_uses(modules, heavy):
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=240,
    )
    assert done.stdout == "[]\n"


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_torchvision_is_neither_installed_nor_imported():
    """With a CPU build of torch, importing it fails and breaks imports in transformers."""
    name = "torch" + "vision"
    assert find_spec(name) is None, f"uninstall {name}, so that these tests run without it"
    assert [relative(path) for path in [*MODULES, *TESTS] if name in imported(path)] == []
    assert name not in (ROOT / "constraints.txt").read_text()


def test_pickles_and_remote_code_are_never_loaded():
    for path in MODULES:
        assert not imported(path) & {"pickle", "dill", "cloudpickle", "joblib"}, relative(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                setting = (node.arg, node.value.value)
                forbidden = [("trust_remote_code", True), ("allow_pickle", True)]
                assert setting not in forbidden, f"{relative(path)}:{node.value.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                raise AssertionError(f"{relative(path)}:{node.lineno} loads a pickle")

"""What a result was measured with: the code, the torch version and, for timings, the machine.

A kept result whose provenance differs from the current one is still used, because measuring takes
hours and most commits change no number. The page marks it, and `--again` measures it again.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import hardware
from benchmarks.papers.job import Job

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("benchmarks", "data", "heads", "launch", "serving", "tests", "trainer")


@dataclass(frozen=True)
class Provenance:
    """`source` is the file of the job's function, relative to the repository; `machine` is empty
    unless the job times something."""

    source: str
    code: str
    torch: str
    machine: str

    @staticmethod
    def of(job: Job) -> "Provenance":
        """The provenance of a result measured now."""
        file = inspect.getsourcefile(job.resolve())
        assert file is not None, "a job is a function in a file"
        return Provenance._now(str(Path(file).resolve().relative_to(_ROOT)), timed=job.alone)

    @staticmethod
    def _now(source: str, *, timed: bool) -> "Provenance":
        file = _ROOT / source
        code = code_digest(file) if file.is_file() else "its file was removed"
        return Provenance(source, code, str(torch.__version__), hardware() if timed else "")

    def outdated(self) -> tuple[str, ...]:
        """The differences from a measurement of the same job made now; empty if there are none."""
        now = Provenance._now(self.source, timed=bool(self.machine))
        differs = []
        if self.code != now.code:
            differs.append("older code")
        if self.torch != now.torch:
            differs.append(f"torch {self.torch}")
        if self.machine != now.machine:
            differs.append(f"timed on {self.machine}")
        return tuple(differs)


def outdated(kept: Mapping[str, Any]) -> tuple[str, ...]:
    """`Provenance.outdated` of a kept result's JSON. Results of earlier versions have none."""
    if "provenance" not in kept:
        return ("older code",)
    return Provenance(**kept["provenance"]).outdated()


@cache
def code_digest(file: Path) -> str:
    """A digest of `file` and of every module of this repository that it imports, directly or not.

    Comments, docstrings and formatting do not change it.
    """
    digests = "".join(_parsed(one)[0] for one in sorted(reached(file)))
    return hashlib.sha256(digests.encode()).hexdigest()[:20]


def reached(file: Path) -> set[Path]:
    """`file` and the modules of this repository that it imports, directly or not."""
    found, waiting = {file}, [file]
    while waiting:
        new = set(_parsed(waiting.pop())[1]) - found
        found |= new
        waiting += new
    return found


@cache
def _parsed(file: Path) -> tuple[str, tuple[Path, ...]]:
    """The digest of a module by itself, and the modules of this repository that it imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {found for name in _imported_names(tree) if (found := _file_of(name)) is not None}
    for node in ast.walk(tree):
        if _has_docstring(node):
            del node.body[0]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(sorted(imported))


def _has_docstring(node: ast.AST) -> bool:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names, in functions too: `a.b` and, for `from a.b import c`, also `a.b.c`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name for alias in names for name in _with_packages(alias.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from _with_packages(module)
                yield from (f"{module}.{alias.name}" for alias in names)


def _with_packages(name: str) -> Iterator[str]:
    """Importing `a.b.c` also runs the `__init__.py` of `a` and `a.b`."""
    parts = name.split(".")
    yield from (".".join(parts[: number + 1]) for number in range(len(parts)))


def _file_of(name: str) -> Path | None:
    """None for modules of other distributions and for names that are not modules."""
    if name.split(".")[0] not in _PACKAGES:
        return None
    path = _ROOT.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((one for one in candidates if one.is_file()), None)

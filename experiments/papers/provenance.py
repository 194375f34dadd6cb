"""The provenance of a result: the code, the torch version and, for timings, the machine.

A stored result whose provenance differs from the current one is still used, because measuring takes
hours and most commits do not change any number. The page marks such results, and `--again` repeats
the measurements.
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

from benchmarks.timing import hardware
from experiments.papers.job import Job

_ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "benchmarks",
    "data",
    "experiments",
    "heads",
    "launch",
    "serving",
    "tests",
    "trainer",
)


@dataclass(frozen=True)
class Provenance:
    """The provenance of one result.

    `source` is the file of the job's function, relative to the repository. `machine` is empty
    unless the job measures times.
    """

    source: str
    code: str
    torch: str
    machine: str

    @staticmethod
    def of(job: Job) -> "Provenance":
        """Return the provenance of a result measured now."""
        file = inspect.getsourcefile(job.resolve())
        assert file is not None, "the function of a job is defined in a file"
        return Provenance._now(str(Path(file).resolve().relative_to(_ROOT)), timed=job.alone)

    @staticmethod
    def _now(source: str, *, timed: bool) -> "Provenance":
        file = _ROOT / source
        code = code_digest(file) if file.is_file() else "its file was removed"
        return Provenance(source, code, str(torch.__version__), hardware() if timed else "")

    def outdated(self) -> tuple[str, ...]:
        """Return how this provenance differs from the provenance of a measurement made now."""
        now = Provenance._now(self.source, timed=bool(self.machine))
        differs = []
        if self.code != now.code:
            differs.append("older code")
        if self.torch != now.torch:
            differs.append(f"torch {self.torch}")
        if self.machine != now.machine:
            differs.append(f"timed on {self.machine}")
        return tuple(differs)


def outdated(stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `Provenance.outdated` for the JSON of a stored result.

    Results stored by earlier versions have no provenance; they count as measured with older code.
    """
    if "provenance" not in stored:
        return ("older code",)
    return Provenance(**stored["provenance"]).outdated()


@cache
def code_digest(file: Path) -> str:
    """Return a digest of `file` and all modules of this repository that it imports, directly or
    indirectly.

    Comments, docstrings and formatting do not change it.
    """
    digests = "".join(_parsed(one)[0] for one in sorted(reached(file)))
    return hashlib.sha256(digests.encode()).hexdigest()[:20]


def reached(file: Path) -> set[Path]:
    """Return `file` and the modules of this repository that it imports, directly or indirectly."""
    found, waiting = {file}, [file]
    while waiting:
        new = set(_parsed(waiting.pop())[1]) - found
        found |= new
        waiting += new
    return found


@cache
def _parsed(file: Path) -> tuple[str, tuple[Path, ...]]:
    """Return the digest of a module alone, and the modules of this repository that it imports."""
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
    """Yield the dotted names of all imports, including those inside functions.

    `from a.b import c` yields `a.b` and `a.b.c`.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name for alias in names for name in _with_packages(alias.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from _with_packages(module)
                yield from (f"{module}.{alias.name}" for alias in names)


def _with_packages(name: str) -> Iterator[str]:
    """Yield `a`, `a.b` and `a.b.c`: importing `a.b.c` runs the `__init__.py` of each parent."""
    parts = name.split(".")
    yield from (".".join(parts[: number + 1]) for number in range(len(parts)))


def _file_of(name: str) -> Path | None:
    """Return the file of a module; None for other distributions and names that are not modules."""
    if name.split(".")[0] not in _PACKAGES:
        return None
    path = _ROOT.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((one for one in candidates if one.is_file()), None)

"""A digest of the code that a result depends on."""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# The experiments, and the losses, trees and heads that they call. A change of the trainer or of the
# data format does not change a number.
_PACKAGES = ("experiments", "heads")


@cache
def code_digest(file: Path) -> str:
    """Return a digest of `file` and all modules of `_PACKAGES` that it imports, directly or
    indirectly.

    Comments, docstrings and formatting do not change it.
    """
    digests = "".join(_parsed(one)[0] for one in sorted(reached(file)))
    return hashlib.sha256(digests.encode()).hexdigest()[:20]


def reached(file: Path) -> set[Path]:
    """Return `file` and the modules of `_PACKAGES` that it imports, directly or indirectly."""
    found, waiting = {file}, [file]
    while waiting:
        new = set(_parsed(waiting.pop())[1]) - found
        found |= new
        waiting += new
    return found


@cache
def _parsed(file: Path) -> tuple[str, tuple[Path, ...]]:
    """Return the digest of a module alone, and the modules of `_PACKAGES` that it imports."""
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

    `from a.b import c` yields `a.b` and `a.b.c`, but not `a`: the `__init__.py` of a folder only
    exports names.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def _file_of(name: str) -> Path | None:
    """Return the file of a module; None for other distributions and names that are not modules."""
    if name.split(".")[0] not in _PACKAGES:
        return None
    path = _ROOT.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((one for one in candidates if one.is_file()), None)

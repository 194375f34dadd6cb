"""Measures the size and the structure of kway: `python -m tests.size`.

Prints the lines per package next to their budgets, the words of long pages of the docs, and counts
of code that may be unnecessary. Exits with 1 if there is an import cycle between files, or a
private name of another library, that `size_allowed.txt` does not list. That list may only shrink.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("size_allowed.txt")
PRODUCT = ("heads", "data", "trainer", "serving", "launch")
# Python lines, and words of the docs.
BUDGETS = {
    "heads": 10_000,
    "data": 11_000,
    "trainer": 12_000,
    "serving": 6_000,
    "launch": 6_000,
    "benchmarks": 2_500,
    "experiments": 5_500,
    "tests": 42_000,
}
DOCS_WORDS, PAGE_WORDS = 40_000, 3_000
MAX_LINES = 6
# Each module of these folders declares a kind, a command or a route, and its registry imports it.
DECLARING = (
    "data/augment/",
    "data/sources/",
    "heads/losses/",
    "launch/commands/",
    "serving/http/routes/",
    "trainer/optimizers/",
    "trainer/strategies/",
)
# Documented by their libraries despite the underscore.
PUBLIC = re.compile(
    r"os\._exit|sys\._(current_frames|getframe)|.*\._(replace|asdict|fields|make)|torch\._foreach_\w+"
)


@dataclass(frozen=True)
class Module:
    """A Python file with its syntax tree."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def imports(self) -> Iterator[tuple[str, str | None]]:
        """Yield the module and the imported name of each import, local ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                yield from ((source, alias.name) for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                yield from ((str(each.value), None) for each in node.args if hasattr(each, "value"))

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Return the module of an import, which may be relative to this one."""
        if not node.level:
            return node.module or ""
        is_package = self.path.endswith("__init__.py")
        parents = self.name.split(".")[: (1 if is_package else 0) - node.level or None]
        return ".".join([*parents, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Code:
    """The modules of kway by name."""

    modules: dict[str, Module]

    @classmethod
    def read(cls, root: Path, packages: Iterable[str] = PRODUCT) -> "Code":
        paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
        read = [
            Module(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in paths
        ]
        return cls({module.name: module for module in read})

    def targets(self, module: Module, *, through_exports: bool = False) -> set[str]:
        """Return the names of kway's modules that `module` imports.

        `through_exports`: an import of a name that a package exports counts as an import of the
        module that defines the name.
        """
        found = set()
        for source, name in module.imports():
            full = f"{source}.{name}"
            target = full if full in self.modules else source
            if through_exports and target in self.modules:
                target = self.exports[target].get(name or "", target)
            if target in self.modules and target != module.name:
                found.add(target)
        return found

    @cached_property
    def exports(self) -> dict[str, dict[str, str]]:
        """For each package, the modules that define the names that its `__init__.py` imports."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for name, module in self.modules.items():
            if module.path.endswith("__init__.py"):
                found[name] = {each: source for source, each in module.imports() if each}
        return found

    def cycles(self) -> list[list[str]]:
        """Return the groups of files that import each other, directly or through others."""
        graph = {name: self.targets(module) for name, module in self.modules.items()}
        return sorted(sorted(group) for group in _components(graph) if len(group) > 1)

    def single_importers(self) -> Iterator[tuple[str, str]]:
        """Yield each module that only one other file imports, and that file."""
        importers: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            if not module.path.endswith("__init__.py"):
                for target in self.targets(module, through_exports=True):
                    importers[target].add(module.path)
        for name, module in self.modules.items():
            if len(importers[name]) == 1 and not module.path.startswith(DECLARING):
                yield module.path, *importers[name]

    def small_functions(self) -> Iterator[tuple[str, int]]:
        """Yield private functions of at most `MAX_LINES` lines that are used once in their file.

        Triton compiles only functions of a module (`jit`), so they cannot be part of their user.
        """
        for module in self.modules.values():
            names = Counter(
                node.id if isinstance(node, ast.Name) else node.attr
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Name | ast.Attribute)
            )
            for node in ast.walk(module.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    is_private = node.name.startswith("_") and not node.name.endswith("__")
                    is_private &= all(ast.unparse(each) != "jit" for each in node.decorator_list)
                    if is_private and lines <= MAX_LINES and names[node.name] == 1:
                        yield f"{module.path}:{node.name}", lines

    def private_names(self) -> set[tuple[str, str]]:
        """Return (file, name) for each use of a private name of another library."""
        own = set().union(*(_defined(module.tree) for module in self.modules.values()))
        packages = {name.partition(".")[0] for name in self.modules}
        return {
            (module.path, name)
            for module in self.modules.values()
            for name in _private_uses(module, own, packages)
            if not PUBLIC.fullmatch(name)
        }


def _components(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the strongly connected components of a graph."""
    reached = {node: _reachable(graph, node) for node in graph}
    seen: set[str] = set()
    for node in graph:
        if node not in seen:
            group = {node} | {other for other in reached[node] if node in reached[other]}
            seen |= group
            yield group


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for following in graph[todo.pop()] - found:
            found.add(following)
            todo.append(following)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> set[str]:
    """Return all names that a file defines: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found.add(node.attr)
    return found


def _private_uses(module: Module, own: set[str], packages: set[str]) -> Iterator[str]:
    """Yield `library._name` for each import, attribute or string that names something private."""
    aliases = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for source, name in module.imports():
        full = f"{source}.{name}" if name else source
        is_other = source.partition(".")[0] not in packages and source != "__future__"
        if is_other and any(map(_is_private, full.split("."))):
            yield full
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute() if _is_private(node.attr):
                root = ast.unparse(node.value)
                library = aliases.get(root.partition(".")[0], "")
                is_other = bool(library) and library.partition(".")[0] not in packages
                if is_other and re.fullmatch(r"[\w.]+", root):
                    yield f"{library}{root[len(root.partition('.')[0]) :]}.{node.attr}"
                elif node.attr not in own:
                    yield f"….{node.attr}"
            case ast.Constant(value=str(text)) if re.fullmatch(
                r"[a-z]\w*(\.\w+)*\._\w[\w.]*", text
            ):
                if text.partition(".")[0] not in packages:
                    yield text
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr")) if (
                len(node.args) > 1
            ):
                attribute = getattr(node.args[1], "value", None)
                if isinstance(attribute, str) and _is_private(attribute) and attribute not in own:
                    yield f"….{attribute}"


def problems(allowed: str, found: Iterable[str]) -> list[str]:
    """Return findings that `size_allowed.txt` does not list, and its lines without a finding."""
    lines = {line for line in allowed.splitlines() if line and not line.startswith("#")}
    new = [f"not allowed: {line}" for line in sorted(set(found) - lines)]
    return [*new, *(f"remove from {ALLOWED.name}: {line}" for line in sorted(lines - set(found)))]


def findings(code: Code) -> list[str]:
    """Return the imports within cycles and the private names, as lines of `size_allowed.txt`."""
    cycles = [
        f"cycle {code.modules[name].path} imports {code.modules[target].path}"
        for group in code.cycles()
        for name in group
        for target in sorted(code.targets(code.modules[name]) & {*group})
    ]
    return [*cycles, *(f"private {path} {name}" for path, name in sorted(code.private_names()))]


def lines_of(root: Path, package: str) -> int:
    files = (root / package).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> int:
    print(f"{'package':<14}{'lines':>9}{'budget':>9}")
    for package, budget in BUDGETS.items():
        lines = lines_of(ROOT, package)
        over = f"  {lines - budget:,} over" if lines > budget else ""
        print(f"{package:<14}{lines:>9,}{budget:>9,}{over}")
    pages = {
        path: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").glob("*.md")
    }
    print(f"{'docs, words':<14}{sum(pages.values()):>9,}{DOCS_WORDS:>9,}")
    for path, words in sorted(pages.items(), key=lambda item: -item[1]):
        if words > PAGE_WORDS:
            print(f"  {path.name:<20}{words:>9,}{PAGE_WORDS:>9,}")
    code = Code.read(ROOT)
    found = findings(code)
    small, single = sorted(code.small_functions()), sorted(code.single_importers())
    num_cycles = len(code.cycles())
    num_private = sum(line.startswith("private") for line in found)
    print(f"\n{num_cycles} cycles between files; {num_private} private names of other libraries")
    print(f"{len(small)} private functions of at most {MAX_LINES} lines with one caller")
    print(f"{len(single)} modules that a single file imports")
    if "--list" in sys.argv:
        print(*found, sep="\n")
        print(*(f"one caller, {lines} lines: {name}" for name, lines in small), sep="\n")
        print(*(f"one importer: {path} <- {importer}" for path, importer in single), sep="\n")
    errors = problems(ALLOWED.read_text(encoding="utf-8"), found)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""An MkDocs hook: the API reference, one page per package, derived from the packages themselves.

A page starts with the names that the package exports, followed by the other public classes and
functions by module. No package is imported, because griffe reads the sources.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGES = ("heads", "data", "trainer", "serving.client")
# In the results of a search, functions such as `resume` follow the sections of the guides.
_BELOW_GUIDES = "---\nsearch: {boost: 0.1}\n---\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    navigation = []
    for name in PACKAGES:
        paths = []
        for path, text in reference(name, Path(config.docs_dir).parent).items():
            # The theme uses the page named index as the landing page of a section.
            paths.append(f"reference/{name}/{'index' if path == name else path}.md")
            files.append(File.generated(config, paths[-1], content=f"{_BELOW_GUIDES}{text}"))
        navigation.append({name: paths})
    config.nav.insert(-1, {"Python API": navigation})  # before the section on the project
    return files


def reference(name: str, root: Path) -> dict[str, str]:
    """The pages of a package and of the packages in it, as Markdown by dotted path."""
    package = griffe.load(name, search_paths=[root])
    packages = list(_packages(package))
    # The path at which an object is defined -> the shortest path under which it is exported.
    exports: dict[str, str] = {}
    for each in reversed(packages):
        for exported in each.exports or ():
            exports[each.members[exported].canonical_path] = f"{each.path}.{exported}"
    return {each.path: "\n".join(_page(each, exports)) for each in packages}


def _page(package: griffe.Module, exports: Mapping[str, str]) -> Iterator[str]:
    yield f"# {package.path}\n"
    yield _entry(package.path, show_root_heading=False, show_root_toc_entry=False, members=False)
    for name in package.exports or ():
        path = f"{package.path}.{name}"
        if path in exports.values():
            yield _entry(path, heading_level=2)
    for module in _modules(package):
        if not module.is_init_module:
            members = [name for name in _public(module) if f"{module.path}.{name}" not in exports]
            yield _entry(module.path, heading_level=2, members=members)


def _entry(path: str, **options: object) -> str:
    return f"::: {path}\n    options: {options}\n"


def _packages(package: griffe.Module) -> Iterator[griffe.Module]:
    """The package, then those below it."""
    yield package
    for module in _modules(package):
        if module.is_init_module:
            yield from _packages(module)


def _modules(package: griffe.Module) -> list[griffe.Module]:
    """The public modules and packages directly in `package`, by name."""
    modules = (package.modules[name] for name in sorted(package.modules))
    return [each for each in modules if not each.is_alias and not each.name.startswith("_")]


def _public(module: griffe.Module) -> list[str]:
    """The public classes and functions defined in a module, in its order."""
    return [
        name
        for name, member in module.members.items()
        if not member.is_alias
        and (member.is_class or member.is_function)
        and not name.startswith("_")
    ]

"""User-defined components, given in a recipe by import path: `kind: my_package.losses:MyLoss`.

Importing a module executes its code. A path is therefore imported only if the user specified it on
the command line, in the recipe file given there, or with `--allow-import`.
"""

import difflib
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, field, make_dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, TypeGuard

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from data.augment.custom import CustomAugmentation
from data.messages import one_line
from heads.logits import LogitMap
from heads.losses import Loss
from trainer.backbone.config import ImportedBackbone
from trainer.optimizers import OptimizerKind
from trainer.schedules import ScheduleKind

# The keys at which a recipe accepts import paths, with the base class that the component must have.
# None means a class or function that returns an nn.Module. `*` matches the indices of a list.
COMPONENTS: dict[str, type | None] = {
    "backbone": None,
    "head.logits": LogitMap,
    "head.loss": Loss,
    "optimizer": OptimizerKind,
    "schedule": ScheduleKind,
    "data.augment.custom.*": CustomAugmentation,
}

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# Types of the defaults that a recipe can store. Other defaults are covered by the digest of the
# source.
_PLAIN = (type(None), bool, int, float, str)


def is_import_path(kind: object) -> TypeGuard[str]:
    """Return whether a `kind` is an import path. Names of built-in kinds do not contain a colon."""
    return isinstance(kind, str) and ":" in kind


def import_paths(tree: object) -> dict[str, str]:
    """Return the import paths in a recipe, or in its mappings, by component key. Nothing is
    imported.
    """
    kinds = {key: at_key(tree, f"{key}.kind") for key in _component_keys(tree)}
    return {key: kind for key, kind in kinds.items() if is_import_path(kind)}


def at_key(tree: Any, key: str) -> Any:
    """Return the value at a dotted key in a recipe or its mappings, or None if the key is
    missing.
    """
    for part in key.split("."):
        match tree:
            case dict():
                tree = tree.get(part)
            case list() | tuple():
                tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else None
            case _:
                tree = getattr(tree, part, None)
    return tree


def with_component(tree: Any, key: str, component: Any) -> Any:
    """Return a recipe's mappings with the value at `key` replaced by `component`."""
    if isinstance(tree, list):
        return [component if str(index) == key else each for index, each in enumerate(tree)]
    first, _, rest = key.partition(".")
    return {**tree, first: with_component(tree[first], rest, component) if rest else component}


def setting_of(key: str) -> str:
    """Return the setting that contains a component: the component itself or the entire list that
    contains it.
    """
    return re.sub(r"\.\d+$", "", key)


def check_allowed(paths: Mapping[str, str], allowed: Collection[str], origin: str) -> None:
    """Raise ValueError with the options to add if a path in `paths` is not allowed."""
    missing = {key: path for key, path in paths.items() if path not in allowed}
    if missing:
        keys = ", ".join(f"{key}.kind" for key in missing)
        options = " ".join(f"--allow-import {path}" for path in dict.fromkeys(missing.values()))
        raise ValueError(
            f"{origin}: {keys} would import code: add {options} if you trust this code"
        )


def import_component(path: str, *, key: str) -> Any:
    """Return the class or function at an import path `module:Class`.

    Raises ValueError if the object does not exist or does not implement the base class that `key`
    requires. The message starts with `key` and the path.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(
            f"{key}.kind is {path!r}: use module:Class, for example my_package.losses:MyLoss"
        )
    component = _attribute(_module(path, key), path, key)
    base = _base(key)
    if base is None:
        if not (inspect.isclass(component) or inspect.isfunction(component)):
            raise ValueError(f"{key}.kind is {path}, which must be a class or a function")
        return component
    if not (isinstance(component, type) and issubclass(component, base)):
        raise ValueError(
            f"{key}.kind is {path}, which must be a subclass of {base.__module__}.{base.__name__}"
        )
    missing: frozenset[str] = getattr(component, "__abstractmethods__", frozenset())
    if missing:
        raise ValueError(f"{key}.kind is {path}, which must define {', '.join(sorted(missing))}")
    if issubclass(component, Loss) and component.score is not Loss.score:
        raise ValueError(
            f"{key}.kind is {path}, which overrides score: set score_kind instead, because bundles "
            "store score_kind"
        )
    return component


def options_of(component: Any, *, key: str) -> type:
    """Return the pydantic model or dataclass that validates a component's options.

    For a backbone, the model is derived from the signature of the class or function: annotations
    are the types, `Annotated[int, Field(gt=0)]` adds bounds, and **kwargs accepts any option.
    """
    if _base(key) is not None:
        assert isinstance(component, type)
        return component
    parameters = inspect.signature(component, eval_str=True).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = ImportedBackbone.model_fields
    for parameter in named:
        if parameter.name in own:
            raise ValueError(
                f"{key}.kind: the class or function has a parameter named {parameter.name}, but "
                "every backbone has an option with this name: rename the parameter"
            )
    fields = [
        (name, info.annotation, field(default=info.get_default())) for name, info in own.items()
    ]
    fields += [
        (p.name, Any if p.annotation is p.empty else p.annotation, _default(p)) for p in named
    ]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    config = ConfigDict(
        extra="allow" if accepts_any else "forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )
    return dataclass(config=config)(make_dataclass("Options", fields, kw_only=True))


def imported_backbone(options: Any, explicit: Collection[str]) -> ImportedBackbone:
    """Return the backbone config from validated options: the `explicit` options and those defaults
    that a recipe can store.
    """
    return ImportedBackbone(
        **{
            name: value
            for name, value in vars(options).items()
            if name in explicit or isinstance(value, _PLAIN)
        }
    )


def source_version(path: str) -> str:
    """Return the digest of the file that defines an imported component, preceded by the version of
    its package if the package is installed. The digest does not cover other files that the
    component uses.
    """
    module = importlib.import_module(path.partition(":")[0])
    defined_in = sys.modules[_attribute(module, path, "kind").__module__].__file__
    assert defined_in is not None, "only built-in modules have no file"
    with open(defined_in, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()[:16]
    try:
        return f"{version(module.__name__.partition('.')[0])} sha256:{digest}"
    except PackageNotFoundError:  # a module on PYTHONPATH
        return f"sha256:{digest}"


def _component_keys(tree: Any) -> list[str]:
    """Return the keys of COMPONENTS, with the indices of the lists in `tree`."""
    keys = []
    for key in COMPONENTS:
        name, starred, _ = key.partition(".*")
        entries = at_key(tree, name)
        if not starred:
            keys.append(key)
        elif isinstance(entries, list | tuple):
            keys += [f"{name}.{index}" for index in range(len(entries))]
    return keys


def _base(key: str) -> type | None:
    return COMPONENTS[re.sub(r"\.\d+$", ".*", key)]


def _default(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return field()
    return field(default_factory=lambda: default)  # dataclasses reject mutable defaults


def _module(path: str, key: str) -> ModuleType:
    name = path.partition(":")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}.kind is {path}: no module named {error.name}: install it, or add its folder to "
            "PYTHONPATH"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(
            f"{key}.kind is {path}: {name} cannot be imported: {one_line(error, 1000)}"
        ) from error


def _attribute(module: ModuleType, path: str, key: str) -> Any:
    found: Any = module
    for name in path.partition(":")[2].split("."):
        near = difflib.get_close_matches(name, dir(found), n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        found = getattr(found, name, MISSING)
        if found is MISSING:
            raise ValueError(f"{key}.kind is {path}: {module.__name__} has no {name}{hint}")
    return found

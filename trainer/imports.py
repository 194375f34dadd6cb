"""User-defined components, given in a recipe by import path: `kind: my_package.losses:MyLoss`.

Importing a module executes its code. A path is therefore imported only if the user specified it on
the command line, in the recipe file given there, or with `--allow-import`.
"""

import difflib
import hashlib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

from pydantic import ConfigDict, create_model

from data.augment.custom import CustomAugmentation
from data.messages import one_line
from heads.logit_maps import LogitMap
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

# kway's own networks by the name that a recipe may use as `backbone.kind`. They are components like
# those of users, but importing them needs no permission.
BUILT_IN = {"bag_of_words": "trainer.backbone.bag_of_words:BagOfWords"}

# Types of the defaults that a recipe can store. Other defaults are covered by the digest of the
# source.
_PLAIN = (type(None), bool, int, float, str)


def is_import_path(kind: object) -> TypeGuard[str]:
    """Return whether a `kind` is an import path. Names of built-in kinds do not contain a colon."""
    return isinstance(kind, str) and ":" in kind


def import_paths(tree: dict[str, Any]) -> dict[str, str]:
    """Return the import paths in a recipe's mappings, by component key. Nothing is imported."""
    return {key: parent[name]["kind"] for key, parent, name in imported_components(tree)}


def imported_components(tree: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key of each component with an import path, the mapping or list that contains it,
    and its name or index there.
    """
    for pattern in COMPONENTS:
        *above, last = pattern.split(".")
        parent: Any = tree
        for part in above:
            parent = parent.get(part) if isinstance(parent, dict) else None
        places: Iterable[tuple[Any, Any]] = ()
        if isinstance(parent, list) and last == "*":
            places = enumerate(parent)
        elif isinstance(parent, dict):
            places = [(last, parent.get(last))]
        for name, options in places:
            if isinstance(options, dict) and is_import_path(options.get("kind")):
                yield ".".join([*above, str(name)]), parent, name


def check_allowed(paths: Mapping[str, str], allowed: Collection[str], origin: str) -> None:
    """Raise ValueError with the options to add if a path in `paths` is not allowed."""
    allowed = {*allowed, *BUILT_IN.values()}
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
    where = f"{key}.kind is {path}"
    if not re.fullmatch(r"[\w.]+:[\w.]+", path):
        raise ValueError(
            f"{key}.kind is {path!r}: use module:Class, for example my_package.losses:MyLoss"
        )
    module = path.partition(":")[0]
    try:
        component = pkgutil.resolve_name(path)
    except AttributeError as error:
        near = difflib.get_close_matches(error.name or "", dir(error.obj), n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ValueError(f"{where}: {module} has no {error.name}{hint}") from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{where}: no module named {error.name}: install it, or add its folder to PYTHONPATH"
        ) from error
    except (ImportError, SyntaxError) as error:
        reason = one_line(error, 1000)
        raise ValueError(f"{where}: {module} cannot be imported: {reason}") from error
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
    fields: dict[str, Any] = {}
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            continue
        if hasattr(ImportedBackbone, each.name) or each.name in ImportedBackbone.model_fields:
            raise ValueError(
                f"{key}.kind: the class or function has a parameter named {each.name}, but every "
                "backbone has an option or attribute with this name: rename the parameter"
            )
        annotation = Any if each.annotation is each.empty else each.annotation
        fields[each.name] = (annotation, ... if each.default is each.empty else each.default)
    accepts_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    config = ConfigDict(extra="allow" if accepts_any else "forbid", arbitrary_types_allowed=True)

    class Base(ImportedBackbone):
        model_config = config

    return create_model("Options", __base__=Base, **fields)


def imported_backbone(options: Any, explicit: Collection[str]) -> ImportedBackbone:
    """Return the backbone config from validated options: the `explicit` options and those defaults
    that a recipe can store.
    """
    values = dict(options).items()
    plain = {name: value for name, value in values if isinstance(value, _PLAIN)}
    return ImportedBackbone(**plain | {name: value for name, value in values if name in explicit})


def source_version(path: str) -> str:
    """Return the digest of the file that defines an imported component, preceded by the version of
    its package if the package is installed. The digest does not cover other files that the
    component uses.
    """
    module = importlib.import_module(path.partition(":")[0])
    defined_in = sys.modules[pkgutil.resolve_name(path).__module__].__file__
    assert defined_in is not None, "only built-in modules have no file"
    with open(defined_in, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()[:16]
    try:
        return f"{version(module.__name__.partition('.')[0])} sha256:{digest}"
    except PackageNotFoundError:  # a module on PYTHONPATH
        return f"sha256:{digest}"


def _base(key: str) -> type | None:
    return COMPONENTS[re.sub(r"\.\d+$", ".*", key)]

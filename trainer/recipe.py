"""Loads a recipe: merges a YAML file over its `base`, applies overrides of the form `a.b.c=value`,
and validates the result with the models in `config.py`.

Mappings are merged recursively, but a mapping is replaced if its `kind` changes or if it specifies
a backbone or a duration by another key. Environment variables are not read.
"""

import copy
import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from data.retry import retried
from trainer.config import Duration, Recipe
from trainer.imports import (
    BUILT_IN,
    COMPONENTS,
    check_allowed,
    import_component,
    import_paths,
    imported_backbone,
    imported_components,
    is_import_path,
    options_of,
)

_MAX_ERRORS_SHOWN = 3
# Keys of which a mapping sets only one.
_ALTERNATIVES = (tuple(Duration.model_fields), ("name", "config"))

# The name of the resolved recipe in a run's folder.
STORED_NAME = "recipe.yaml"


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-8 as a number and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)  # merge keys: <<
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        duplicates = {str(key) for key in keys if keys.count(key) > 1}
        if duplicates:
            mark = node.start_mark
            names = ", ".join(sorted(duplicates))
            raise ValueError(f"line {mark.line + 1}: duplicate key {names}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    allow_imports: Collection[str] = (),
    is_trusted: bool = True,
) -> Recipe:
    """Load a recipe from a YAML file and apply `key=value` overrides in order.

    The file is merged over the recipe at the path in its `base` key, which is relative to the file.
    Import paths in the file and in the overrides are imported. For a recipe stored by a run, which
    may come from another machine, and if `is_trusted` is false, only import paths in
    `allow_imports` and in the overrides are imported.

    Raises FileNotFoundError if the file is missing, and ValueError, naming the key and the closest
    known name, if the recipe is not valid.
    """
    tree = read_recipe(path)
    is_stored = path.name == STORED_NAME and (path.parent / "checkpoints").is_dir()
    trusted = import_paths(tree).values() if is_trusted and not is_stored else ()
    overridden: dict[str, Any] = {}
    for override in overrides:
        _apply(tree, override)
        _apply(overridden, override)
    allowed = {*allow_imports, *trusted, *import_paths(overridden).values()}
    return build_recipe(tree, origin=f"recipe {path}", allow_imports=allowed)


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mappings of a YAML file merged over those of its base, without validation or
    imports.

    `above` lists the files to be merged over this one.
    """
    base_of = f" (base of {above[-1]})" if above else ""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"recipe {path}{base_of} {problem}: pass the path of a YAML file")
    try:
        text = retried(str(path), lambda: path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {path} is not UTF-8 text: {error}") from None
    tree = _parse(text, f"recipe {path}")
    if not isinstance(tree, dict):
        raise ValueError(f"recipe {path} is not a mapping of keys to values")
    _resolve_built_in(tree.get("backbone"))
    if path.name == STORED_NAME:
        drop_removed_settings(tree)
    if "base" not in tree:
        return tree
    base = tree.pop("base")
    if not isinstance(base, str):
        raise ValueError(
            f"recipe {path}: base is {base!r}, but it must be the path of another recipe"
        )
    below = path.parent / base
    if any(below.resolve() == file.resolve() for file in (*above, path)):
        raise ValueError(
            f"recipe {path}: base is {base}, which is itself based on this recipe: remove one of "
            "the `base` keys"
        )
    merged: dict[str, Any] = _merged(read_recipe(below, (*above, path)), tree)
    return merged


def drop_removed_settings(tree: dict[str, Any]) -> None:
    """Drop the settings that only earlier versions stored from a recipe's mappings.

    A resumed run compares the digest of its shards with the one in the checkpoint instead of the
    generation.
    """
    data, evaluation = tree.get("data") or {}, tree.get("evaluation") or {}
    for one in (data, *(data.get("mixture") or ())):
        one.pop("generation", None)
    for name in ("marginal_topk", "marginal_temperature"):
        evaluation.pop(name, None)
    (tree.get("telemetry") or {}).pop("peak_tflops", None)
    (tree.get("train") or {}).pop("profile", None)


def build_recipe(
    tree: dict[str, Any], *, origin: str, allow_imports: Collection[str] = ()
) -> Recipe:
    """Build a recipe from plain mappings. Error messages start with `origin`. Only import paths in
    `allow_imports` are imported."""
    check_allowed(import_paths(tree), allow_imports, origin)
    tree = copy.deepcopy(tree)
    for key, parent, name in imported_components(tree):
        parent[name] = make_component(parent[name], key=key, origin=origin)
    try:
        return Recipe.model_validate(_with_default_kinds(tree, Recipe))
    except ValidationError as error:
        raise _one_line_error(error, origin, Recipe) from None


def make_component(options: dict[str, Any], *, key: str, origin: str) -> Any:
    """Import the component at the path `options["kind"]` and validate its other options.

    The caller must have checked that importing the path is allowed. `key` is the component's key in
    the recipe.
    """
    try:
        component = import_component(options["kind"], key=key)
        model = options_of(component, key=key)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    try:
        component_config: Any = TypeAdapter(model).validate_python(options)
    except ValidationError as error:
        raise _one_line_error(error, origin, model, key) from None
    return imported_backbone(component_config, options) if key == "backbone" else component_config


def _one_line_error(error: ValidationError, origin: str, root: type, key: str = "") -> ValueError:
    """Return a one-line ValueError for the errors that `root` reports for the mapping at `key`."""
    messages = [_describe(item, root, key) for item in error.errors(include_url=False)]
    more = len(messages) - _MAX_ERRORS_SHOWN
    shown = "; ".join(messages[:_MAX_ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return ValueError(f"{origin}: {shown}")


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML. Loading it with `load_recipe` returns an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{origin} is not valid YAML{where}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: {error}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"override {override!r} is not of the form key=value, for example seed=1")
    value = _parse(text, f"override {override!r}")
    if keys == ["backbone"]:
        _resolve_built_in(value)
    elif keys == ["backbone", "kind"] and isinstance(value, str):
        value = BUILT_IN.get(value, value)
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            _drop_alternatives(tree, key, {})
            tree[key] = {}
        tree = tree[key]
    last = keys[-1]
    # A mapping without a kind uses the default kind, which is never an import path.
    default = None if is_import_path(value) else value
    another_kind = last in ("kind", "model_type") and tree.get(last, default) != value
    if another_kind:
        tree.clear()
    _drop_alternatives(tree, last, value)
    tree[last] = _merged(tree.get(last), value)


def _resolve_built_in(backbone: Any) -> None:
    """Replace the name of one of kway's own networks by its import path."""
    if isinstance(backbone, dict) and isinstance(kind := backbone.get("kind"), str):
        backbone["kind"] = BUILT_IN.get(kind, kind)


def _drop_alternatives(tree: dict[str, Any], key: str, value: Any) -> None:
    """Drop the keys that cannot be set together with `key`. Keep the others: dropping `weights:
    pretrained` would go unnoticed.
    """
    if _is_alternative(tree, {key: value}):
        for other in {other for keys in _ALTERNATIVES if key in keys for other in keys}:
            tree.pop(other, None)


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    # A new kind drops the settings of the old kind. A mapping with `model_type` always replaces the
    # old mapping, because it is a full description.
    another_kind = "kind" in new and new["kind"] != old.get("kind")
    if another_kind or "model_type" in new or _is_alternative(old, new):
        return new
    return {key: _merged(old.get(key), new.get(key, old.get(key))) for key in {**old, **new}}


def _is_alternative(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether `new` sets another one of the keys of which a mapping sets only one."""
    if is_import_path(old.get("kind")):  # the keys are the arguments of a user's class
        return False
    for keys in _ALTERNATIVES:
        before, after = ({key for key in keys if each.get(key) is not None} for each in (old, new))
        if before and after and not before & after:
            return True
    return False


def _with_default_kinds(tree: Any, model: type[BaseModel]) -> Any:
    """Add the field's default `kind` to mappings without one: `optimizer: {lr: 1}` means sgd."""
    if not isinstance(tree, dict):
        return tree
    filled = dict(tree)
    for name, field in model.model_fields.items():
        if isinstance(value := tree.get(name), dict):
            default = field.get_default(call_default_factory=False)
            kind = getattr(default, "kind", None)
            filled[name] = {"kind": kind, **value} if kind is not None else value
            if isinstance(default, BaseModel):
                filled[name] = _with_default_kinds(filled[name], type(default))
    return filled


def _describe(error: Any, root: type, key: str) -> str:
    location, models = _walk(error["loc"], root)
    path = ".".join(map(str, [key, *location] if key else location))
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            known = sorted({name for model in models for name in _fields(model)})
            near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            return f"{path} is not a known key: {hint}"
        case "missing":
            return f"{path} is missing"
        case "union_tag_invalid":
            kinds = error["ctx"]["expected_tags"].replace("'", "").split(", ")
            near = difflib.get_close_matches(error["ctx"]["tag"].lower(), kinds, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            kind = f"{path}.kind is {error['ctx']['tag']!r}"
            own = ", or module:Class for your own" if path in COMPONENTS else ""
            return f"{kind}: {hint}choose one of {', '.join(kinds)}{own}"
        case "union_tag_not_found":
            return f"{path}.kind is missing"
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    where = f"{path}: " if path else ""  # an error about several keys already names them
    return f"{where}{message}" + (
        f", got {value!r}" if isinstance(value, str | int | float) else ""
    )


def _walk(location: Sequence[str | int], root: type) -> tuple[list[str | int], list[type]]:
    """Follow a pydantic location, which is relative to `root`.

    Returns the path as a user writes it, without the `kind` that pydantic inserts for unions, and
    the pydantic models and dataclasses that may contain the last part.
    """
    path: list[str | int] = []
    models = parents = [root]
    for part in location:
        parents = models
        if len(models) > 1 and any(_kind(model) == part for model in models):
            models = [model for model in models if _kind(model) == part]
            continue
        path.append(part)
        if not isinstance(part, int):
            fields = [_fields(model)[part] for model in models if part in _fields(model)]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return path, parents


def _models_in(annotation: Any) -> Iterable[type]:
    if isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__"):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, tuple, list):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _fields(model: type) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = model.__pydantic_fields__  # type: ignore[attr-defined]
    return fields


def _kind(model: type) -> Any:
    field = _fields(model).get("kind")
    return field.default if field else None

"""What an API server does with a custom resource beyond its schema: it fills in the defaults, then
asks the rules in CEL (`x-kubernetes-validations`), each about the value where it stands."""

import copy
from collections.abc import Iterator
from typing import Any

import cel

Schema = dict[str, Any]
_RULES = "x-kubernetes-validations"


def defaulted(schema: Schema, value: Any) -> Any:
    """`value` as the server keeps it: fields left out have their schema's default.

    A default within a field that is left out whole does not bring that field about.
    """
    if isinstance(value, dict):
        filled = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in filled and "default" in field:
                filled[name] = copy.deepcopy(field["default"])
            if name in filled:
                filled[name] = defaulted(field, filled[name])
        return filled
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), item) for item in value]
    return value


def broken_rules(schema: Schema, value: Any, path: str = "$") -> Iterator[str]:
    """What the rules say against a value that the schema takes and that has its defaults."""
    for rule in schema.get(_RULES, ()):
        if cel.evaluate(rule["rule"], {"self": value}) is not True:
            yield f"{path}: {rule['message']}"
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value:
                yield from broken_rules(field, value[name], f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from broken_rules(schema.get("items", {}), item, f"{path}[{index}]")


def rules(*rules: tuple[str, str]) -> Schema:
    """A part of a schema: each rule is the expression and what is said where it is not true."""
    return {_RULES: [{"rule": rule, "message": message} for rule, message in rules]}

"""Defaults and CEL rules (`x-kubernetes-validations`) of custom resources.

Sets the defaults of the schema, then evaluates each rule on its value, as an API server does.
"""

import copy
from collections.abc import Iterator
from typing import Any

import cel

Schema = dict[str, Any]
_RULES = "x-kubernetes-validations"


def defaulted(schema: Schema, value: Any) -> Any:
    """Return `value` as the server stores it: missing fields have the defaults of their schemas.

    A default inside a missing field does not create that field.
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
    """Yield the violated rules of a value that matches the schema and has its defaults."""
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
    """Return a part of a schema. Each rule is a CEL expression and the message to show if it is
    false."""
    return {_RULES: [{"rule": rule, "message": message} for rule, message in rules]}

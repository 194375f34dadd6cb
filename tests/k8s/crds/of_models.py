"""Schemas of custom resources out of Python packages whose models are generated from what the
operator publishes: every field, its type, which are needed, and the limits that the models kept.

Left out are descriptions, `status`, and what other schemas check: metadata, and Jobs and pods
inside of the resource. For packages that are not installed with kway, such a schema is printed as
YAML by `python -m tests.k8s.crds.of_models MODULE KIND`.
"""

import importlib
import sys
from typing import Any

import yaml
from pydantic import BaseModel

Schema = dict[str, Any]
_OF_KUBERNETES = ("IoK8s", "ObjectMeta")
_KEPT = ["type", "const", "enum", "default", "required", "pattern", "minimum", "maximum"]
_KEPT += ["minLength", "maxLength", "minItems", "maxItems"]


def spec_of(model: type[BaseModel]) -> Schema:
    """What the model says of a resource's `spec`: closed, all references filled in."""
    whole = model.model_json_schema()
    return _plain(whole["properties"]["spec"], whole["$defs"])


def _plain(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if name := schema.get("$ref", "").rpartition("/")[2]:
        found = definitions[name]
        if name.startswith(_OF_KUBERNETES) and found["type"] == "object":
            return {"type": "object"}
        return _plain(found, definitions)
    plain = {key: schema[key] for key in _KEPT if schema.get(key) is not None}
    if "pattern" in plain:
        # Go takes flags anywhere, Python only in front.
        plain["pattern"] = plain["pattern"].replace("^(?i)", "(?i)^")
    if options := _options(schema, definitions):
        # A field that is left out is None in a model; the API server takes no null.
        plain |= options[0] if len(options) == 1 else {"anyOf": options}
    if "items" in schema:
        plain["items"] = _plain(schema["items"], definitions)
    return plain | _inside(schema, definitions)


def _options(schema: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    options = schema.get("anyOf", ())
    return [_plain(option, definitions) for option in options if option != {"type": "null"}]


def _inside(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """The fields of an object, or what all of its values are."""
    if fields := schema.get("properties"):
        known = {name: _plain(field, definitions) for name, field in fields.items()}
        return {"properties": known, "additionalProperties": False}
    if isinstance(values := schema.get("additionalProperties"), dict):
        return {"additionalProperties": _plain(values, definitions)}
    return {}


if __name__ == "__main__":
    _module, _kind = sys.argv[1:]
    _model = getattr(importlib.import_module(_module), _kind)
    yaml.safe_dump(spec_of(_model), sys.stdout, width=100)

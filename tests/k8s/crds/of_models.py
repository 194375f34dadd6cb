"""Schemas of custom resources, derived from Python models that were generated from the CRDs.

They contain every field with its type, which fields are required, and the limits of the models.
They omit descriptions, `status`, and the parts that other schemas check: metadata, and the Jobs and
pods in the resource. To print a schema from a package that is not installed with kway as YAML, run
`python -m tests.k8s.crds.of_models MODULE KIND`.
"""

import importlib
import sys
from typing import Any

import yaml
from pydantic import BaseModel

Schema = dict[str, Any]
_OF_KUBERNETES = ("IoK8s", "ObjectMeta")
_KEYS = ["type", "const", "enum", "default", "required", "pattern", "minimum", "maximum"]
_KEYS += ["minLength", "maxLength", "minItems", "maxItems"]


def spec_of(model: type[BaseModel]) -> Schema:
    """Return the closed schema of a resource's `spec`, with all references resolved."""
    schema = model.model_json_schema()
    return _plain(schema["properties"]["spec"], schema["$defs"])


def _plain(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if name := schema.get("$ref", "").rpartition("/")[2]:
        found = definitions[name]
        if name.startswith(_OF_KUBERNETES) and found["type"] == "object":
            return {"type": "object"}
        return _plain(found, definitions)
    plain = {key: schema[key] for key in _KEYS if schema.get(key) is not None}
    if "pattern" in plain:
        # Go accepts flags anywhere, Python only at the start.
        plain["pattern"] = plain["pattern"].replace("^(?i)", "(?i)^")
    if options := _options(schema, definitions):
        # A missing field is None in a model, but the API server does not accept null.
        plain |= options[0] if len(options) == 1 else {"anyOf": options}
    if "items" in schema:
        plain["items"] = _plain(schema["items"], definitions)
    return plain | _inside(schema, definitions)


def _options(schema: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    options = schema.get("anyOf", ())
    return [_plain(option, definitions) for option in options if option != {"type": "null"}]


def _inside(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the schemas of the fields of an object, or of all of its values."""
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

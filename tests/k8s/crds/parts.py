"""Parts that the schemas of several resource kinds share."""

from typing import Any

from tests.k8s.cel_rules import Schema, rules

NAME: Schema = {
    "type": "string",
    "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
    "maxLength": 63,
}
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
# The content is checked by the schema of a Job or a pod.
INSIDE: Schema = {"type": "object"}
# For names that become the name of a Service.
SERVICE_NAME = (
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name is not a valid RFC 1035 name",
)


def closed(required: str = "", **properties: Any) -> Schema:
    """Return the schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def resource(api_version: str, kind: str, spec: Schema, *own_rules: tuple[str, str]) -> Schema:
    """Return the schema of a manifest of this kind, with rules for the complete manifest."""
    metadata = closed("name", name=NAME, namespace=NAME, labels=STRINGS, annotations=STRINGS)
    fields = closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
    return fields | rules(*own_rules)

"""What the schemas of several kinds are put together from."""

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
# What is inside is checked as a Job's or a pod's own.
INSIDE: Schema = {"type": "object"}
# For what becomes the name of a Service.
NAME_OF_A_SERVICE = (
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name is not a name of RFC 1035",
)


def closed(required: str = "", **properties: Any) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def resource(api_version: str, kind: str, spec: Schema, *whole: tuple[str, str]) -> Schema:
    """A manifest of this kind, with rules about the whole of it."""
    metadata = closed("name", name=NAME, namespace=NAME, labels=STRINGS, annotations=STRINGS)
    fields = closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
    return fields | rules(*whole)

"""Additions to FastAPI's OpenAPI document: parts that all operations share, and schemas of bodies
that FastAPI does not parse."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_IMAGES = ("image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif")
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a body that FastAPI does not parse. `complete_document` moves its
    `$defs` to the location that its references point to."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")


def request_body(content: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a body. `content` has the descriptions of
    its content types."""
    return {"requestBody": {"required": True, "content": content}}


def raw_inputs(where: str) -> dict[str, Any]:
    """Return the content types of a body that is a single input. `where` describes the location
    of its parameters."""
    file = {"type": "string", "format": "binary", "description": f"one image; {where}"}
    text = {"type": "string", "description": f"one text; {where}"}
    images = {kind: {"schema": file} for kind in (*_IMAGES, "application/octet-stream")}
    return {**images, "text/plain": {"schema": text}}


def complete_document(api: FastAPI, *, open_paths: Collection[str] | None) -> None:
    """Complete FastAPI's OpenAPI document of `api`: set the summaries, move the definitions and add
    the tokens.

    `open_paths` are the paths that do not require a token, or None if no path requires one.
    """
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is not None:
            return api.openapi_schema
        document = plain()
        components = document["components"]
        if open_paths is not None:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                _set_summary(operation)
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    for name, schema in content["schema"].pop("$defs", {}).items():
                        assert components["schemas"].setdefault(name, schema) == schema, name
                if open_paths is not None and path not in open_paths:
                    _require_token(operation)
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _set_summary(operation: dict[str, Any]) -> None:
    """Use the first paragraph of the docstring as the summary, instead of the function name."""
    text = operation.pop("description", operation["summary"])
    summary, _, rest = text.partition("\n\n")
    operation["summary"] = " ".join(summary.split()).removesuffix(".")
    if rest:
        operation["description"] = rest


def _require_token(operation: dict[str, Any]) -> None:
    operation["security"] = [{"token": []}]
    for status, what in (("401", "Token missing or invalid"), ("503", "Temporarily unavailable")):
        operation["responses"].setdefault(status, {"description": what, "content": _ERROR})

"""Additions to FastAPI's OpenAPI document: parts that all operations share, and schemas of bodies
that FastAPI does not parse."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_IMAGES = ("image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif")
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a body that FastAPI does not parse. `complete_document` moves its
    `$defs` to the location that its references point to."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is JSON, `model`."""
    content = {"application/json": {"schema": schema_of(model)}}
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
    edits = [_set_summaries, _move_definitions]
    if open_paths is not None:
        edits.append(partial(_add_tokens, open_paths=open_paths))
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            for edit in edits:
                edit(document)
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _set_summaries(document: dict[str, Any]) -> None:
    """Use the first paragraph of each operation's docstring as its summary, instead of its function
    name."""
    for _, operation in _operations(document):
        text = operation.pop("description", operation["summary"])
        summary, _, rest = text.partition("\n\n")
        operation["summary"] = " ".join(summary.split()).removesuffix(".")
        if rest:
            operation["description"] = rest


def _move_definitions(document: dict[str, Any]) -> None:
    """Move the definitions in each request body's schema to the document's components."""
    components = document["components"]["schemas"]
    for _, operation in _operations(document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            for name, schema in content["schema"].pop("$defs", {}).items():
                assert components.setdefault(name, schema) == schema, name


def _add_tokens(document: dict[str, Any], open_paths: Collection[str]) -> None:
    """Add bearer authentication and its error responses."""
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer"}
    for path, operation in _operations(document):
        if path in open_paths:
            continue
        operation["security"] = [{"token": []}]
        for status, what in (
            ("401", "Token missing or invalid"),
            ("503", "Temporarily unavailable"),
        ):
            operation["responses"].setdefault(status, {"description": what, "content": _ERROR})


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation

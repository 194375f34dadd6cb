"""Additions to FastAPI's OpenAPI document: tokens, and schemas of bodies that FastAPI does not
parse."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_NO_TOKEN = {"description": "Token missing or invalid", "content": _ERROR}


def request_body(model: type[BaseModel], **content: Any) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a body, which FastAPI does not parse: JSON
    that `model` validates, or `content` by content type."""
    json = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": {**json, **content}}}


def raw_inputs(where: str) -> dict[str, Any]:
    """Return the content types of a body that is a single input. `where` describes the location
    of its parameters."""
    file = {"type": "string", "format": "binary", "description": f"one image; {where}"}
    text = {"type": "string", "description": f"one text; {where}"}
    image = {"schema": file}
    return {"image/*": image, "application/octet-stream": image, "text/plain": {"schema": text}}


def require_tokens(api: FastAPI, open_paths: Collection[str]) -> None:
    """Add the tokens to the OpenAPI document of `api`. `open_paths` do not require one."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            scheme = {"token": {"type": "http", "scheme": "bearer"}}
            document["components"]["securitySchemes"] = scheme
            for path in document["paths"].keys() - set(open_paths):
                for operation in document["paths"][path].values():
                    operation["security"] = [{"token": []}]
                    operation["responses"].setdefault("401", _NO_TOKEN)
        return api.openapi_schema or {}

    api.openapi = openapi  # type: ignore[method-assign]

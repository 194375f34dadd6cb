"""Additions to FastAPI's OpenAPI document: schemas of bodies that FastAPI does not parse."""

from typing import Any

from pydantic import BaseModel


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

"""Parts of the OpenAPI document that all operations share: groups, summaries, body schemas."""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from serving.http.streams import NDJSON


class NdjsonSchema(JSONResponse):
    """Documents the lines of a response as JSON: FastAPI would document them as strings."""

    media_type = NDJSON


def refused(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    """The errors of a route whose `response_class` is `NdjsonSchema`; they are plain JSON."""
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    described = {"description": "Refused", "content": {"application/json": {"schema": schema}}}
    return dict.fromkeys(statuses, described)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a body that FastAPI does not parse. `document_definitions` moves its `$defs` to
    the target of its references."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")


def request_body(model: type[BaseModel], kind: str = "application/json") -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is `model`."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema_of(model)}}}}


def document_definitions(api: FastAPI) -> None:
    """Move the definitions of each request body's schema into the document's components."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            components = document["components"]["schemas"]
            for methods in document["paths"].values():
                for operation in methods.values():
                    for content in operation.get("requestBody", {}).get("content", {}).values():
                        for name, schema in content["schema"].pop("$defs", {}).items():
                            assert components.setdefault(name, schema) == schema, name
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def document_summaries(api: FastAPI) -> None:
    """Make the first paragraph of each operation's docstring its summary, not its name in code."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            for methods in plain()["paths"].values():
                for operation in methods.values():
                    summary, _, rest = operation.pop("description", operation["summary"]).partition(
                        "\n\n"
                    )
                    operation["summary"] = " ".join(summary.split()).removesuffix(".")
                    if rest:
                        operation["description"] = rest
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]

"""`POST /v1/query`: does each image or text belong to the classes? A query is JSON, a form or a raw
body."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Query as QueryParam

from serving.http.direct_query import PATH, answer_query
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import raw_inputs, schema_of
from serving.http.query_body import QueryBody, QueryParameters
from serving.http.routing import ServiceDep
from serving.schemas import Answer

_FORM = {
    "type": "object",
    "required": ["classes"],
    "properties": {
        "classes": {"type": "array", "items": {"type": "string"}},
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "texts": {"type": "array", "items": {"type": "string"}},
        "recall": {"type": "number"},
        "threshold": {"type": "number"},
        "require": {"enum": ["guaranteed"]},
    },
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": schema_of(QueryBody)},
            "multipart/form-data": {"schema": _FORM},
            **raw_inputs("the classes are in the URL"),
        },
    }
}


router = APIRouter()


@router.post(PATH, responses=ERROR_RESPONSES, openapi_extra=_BODY)
async def query(
    request: Request, parameters: Annotated[QueryParameters, QueryParam()], service: ServiceDep
) -> Answer:
    """Does each image or text belong to these classes?

    Send JSON with images in base64, a form with files, or a single image or text as the body, with
    the classes in the URL.
    """
    return await answer_query(request, parameters, service)

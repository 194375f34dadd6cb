"""`POST /v1/query`: is each picture, or text, of these classes?"""

from fastapi import APIRouter, Request

from serving.answer import Answer
from serving.errors import REFUSALS
from serving.http.bodies import QueryBody, read_query
from serving.service import Service

_FORM = {
    "type": "object",
    "required": ["classes"],
    "properties": {
        "classes": {"type": "array", "items": {"type": "string"}},
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "texts": {"type": "array", "items": {"type": "string"}},
        "recall": {"type": "number"},
        "threshold": {"type": "number"},
    },
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": QueryBody.model_json_schema()},
            "multipart/form-data": {"schema": _FORM},
        },
    }
}


def query_routes(service: Service) -> APIRouter:
    """The routes of one-class questions."""
    routes = APIRouter()

    @routes.post("/v1/query", responses=REFUSALS, openapi_extra=_BODY)
    async def query(request: Request) -> Answer:
        """Is each picture, or text, of these classes? JSON with pictures in base64, or a form."""
        async with service.admitted() as progress:
            asked = await read_query(request, service.config, service.model.reads)
            progress.arrived = True
            question = await service.question(asked.classes, asked.recall, asked.threshold)
            found = await service.answer(asked.inputs, question)
            progress.inputs = len(found.results)
            return found

    return routes

"""`POST /v1/query`: is each picture, or text, of these classes? By JSON, a form or a raw body."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from serving.http.error_responses import REFUSALS
from serving.http.openapi import schema_of
from serving.http.query_body import QueryBody, QuestionParameters, read_query
from serving.http.routing import ServiceDep, facts
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
    },
}
_FILE = {
    "type": "string",
    "format": "binary",
    "description": "one picture; the question is in the URL",
}
_TEXT = {"type": "string", "description": "one text; the question is in the URL"}
_PICTURES = ("image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif")
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": schema_of(QueryBody)},
            "multipart/form-data": {"schema": _FORM},
            **{kind: {"schema": _FILE} for kind in (*_PICTURES, "application/octet-stream")},
            "text/plain": {"schema": _TEXT},
        },
    }
}


router = APIRouter()


@router.post("/v1/query", responses=REFUSALS, openapi_extra=_BODY)
@facts(is_idempotent=True)
async def query(
    request: Request, asked: Annotated[QuestionParameters, Query()], service: ServiceDep
) -> Answer:
    """Is each picture, or text, of these classes?

    JSON with pictures in base64, a form with files, or one picture or text as the body and the
    question in the URL.
    """
    async with service.admitted() as progress:
        found = await read_query(request, asked, service, progress)
        question = await service.question(found.classes, found.recall, found.threshold)
        answer = await service.answer(found.inputs, question)
        progress.inputs = len(answer.results)
        return answer

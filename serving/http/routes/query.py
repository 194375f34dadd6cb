"""`POST /v1/query`: does each image or text belong to the classes? `POST /v1/classify`: which
classes does it belong to? A request is JSON, a form or a raw body."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Query as QueryParam
from starlette.responses import Response
from starlette.routing import Route

from serving.api_error import ApiError, validated
from serving.http.entry import ServiceDep
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import raw_inputs, request_body
from serving.http.query_body import (
    ClassifyBody,
    ClassifyParameters,
    QueryBody,
    QueryParameters,
    read_query,
)
from serving.limits import check_count
from serving.schemas import Answer, Classification

_PATH = "/v1/query"
_NONE = QueryParameters()
_FILES = {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}}
_JSON_FIELDS = QueryBody.model_json_schema()
_FORM = {**_JSON_FIELDS, "properties": {**_JSON_FIELDS["properties"], **_FILES}}


router = APIRouter()


@router.post(
    _PATH,
    response_model=Answer,
    responses=ERROR_RESPONSES,
    openapi_extra=request_body(
        QueryBody,
        **{"multipart/form-data": {"schema": _FORM}},
        **raw_inputs("the classes are in the URL"),
    ),
)
async def query(
    request: Request, parameters: Annotated[QueryParameters, QueryParam()], service: ServiceDep
) -> Response:
    """Does each image or text belong to these classes?

    Send JSON with images in base64, a form with files, or a single image or text as the body, with
    the classes in the URL.
    """
    async with service.admitted(request.state.client) as progress:
        asked, inputs = await read_query(request, parameters, QueryBody, service, progress)
        if not asked.classes:
            message = "classes is empty. Add at least one class to the URL, as ?classes=NAME"
            raise ApiError(422, "invalid_query", message)
        check_count(len(asked.classes), "classes", service.config.max_classes)
        answer = await service.answer(inputs, await service.make_query(asked.classes, asked))
        progress.inputs = len(answer.results)
        return Response(answer.model_dump_json(), media_type="application/json")


@router.post(
    "/v1/classify",
    responses=ERROR_RESPONSES,
    openapi_extra=request_body(ClassifyBody, **raw_inputs("`top` and the rule are in the URL")),
)
async def classify(
    request: Request, parameters: Annotated[ClassifyParameters, QueryParam()], service: ServiceDep
) -> Classification:
    """Which classes does each image or text belong to?

    Returns the classes with the largest scores among all classes and, with a recall or threshold,
    whether they match. A query for given classes is
    faster, because it reads only the weights of these classes.
    """
    async with service.admitted(request.state.client) as progress:
        asked, inputs = await read_query(request, parameters, ClassifyBody, service, progress)
        found = await service.classify(inputs, asked.top, await service.make_query((), asked))
        progress.inputs = len(inputs)
        return found


async def _direct(request: Request) -> Response:
    names = request.query_params
    values = {name: names.getlist(name) if name == "classes" else names[name] for name in names}
    parameters = validated(QueryParameters, values, "invalid_parameter") if values else _NONE
    return await query(request, parameters, request.state.version.service)


# Answers queries in place of FastAPI's route, whose dependencies and serialization take more CPU
# time than all other work for a query except the model's.
DIRECT_QUERY = Route(_PATH, _direct, methods=["POST"])

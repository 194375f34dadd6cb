"""`POST /v1/classify`: the classes with the largest scores for each image or text."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Query as QueryParam

from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import raw_inputs, schema_of
from serving.http.query_body import ClassifyBody, ClassifyParameters, read_classification
from serving.http.routing import ServiceDep
from serving.schemas import Classification

router = APIRouter()

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": schema_of(ClassifyBody)},
            **raw_inputs("`top` and the rule are in the URL"),
        },
    }
}


@router.post("/v1/classify", responses=ERROR_RESPONSES, openapi_extra=_BODY)
async def classify(
    request: Request, parameters: Annotated[ClassifyParameters, QueryParam()], service: ServiceDep
) -> Classification:
    """Which classes does each image or text belong to?

    Returns the classes with the largest scores among all classes and, with a recall or threshold,
    whether they match. A query for given classes is
    faster, because it reads only the weights of these classes.
    """
    async with service.admitted(request.state.client) as progress:
        inputs, asked = await read_classification(request, parameters, service, progress)
        query = await service.make_query((), asked)
        found = await service.classify(inputs, asked.top, query)
        progress.inputs = len(inputs)
        return found

"""Answers the most frequent request, `POST /v1/query` with JSON, without FastAPI.

FastAPI's routing, dependencies and serialization take more CPU time than all other work for such a
request except the model's. The route in `routes/query.py` documents this request, and answers it if
the body is a form, an image or a text.
"""

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api_error import ApiError
from serving.http.error_responses import client_left, response_of
from serving.http.query_body import QueryParameters, read_query
from serving.schemas import Answer
from serving.service import Service

PATH = "/v1/query"
_NO_PARAMETERS = QueryParameters()


class DirectQuery:
    """ASGI middleware that answers JSON queries and passes other requests to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_json_query(scope):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            service = request.state.version.service
            answer = await answer_query(request, _NO_PARAMETERS, service)
            response = Response(answer.model_dump_json(), media_type="application/json")
        except ApiError as error:
            response = response_of(error)
        except ClientDisconnect:
            response = client_left()
        await response(scope, receive, send)


def _is_json_query(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
        return False
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return kinds == [b"application/json"] and not scope["query_string"]


async def answer_query(request: Request, parameters: QueryParameters, service: Service) -> Answer:
    """Read a query from a request and answer it. Raises ApiError if it is invalid or rejected."""
    async with service.admitted(request.state.client) as progress:
        found = await read_query(request, parameters, service, progress)
        query = await service.make_query(found.classes, found.rule)
        answer = await service.answer(found.inputs, query)
        progress.inputs = len(answer.results)
        return answer

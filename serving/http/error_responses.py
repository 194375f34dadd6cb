"""Error responses: all errors, including the framework's, are returned as JSON in the same format,
`ErrorBody`."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serving.api_error import ApiError, first_of
from serving.schemas import ErrorBody, ErrorDetail

_log = logging.getLogger("kway.serving")

# For the OpenAPI document of routes that read a body.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 404, 408, 413, 415, 422, 429, 503)
}


def response_of(error: ApiError) -> JSONResponse:
    body = ErrorBody(error=ErrorDetail(code=error.code, message=str(error)))
    return JSONResponse(body.model_dump(), status_code=error.status, headers=error.headers)


def install_handlers(api: FastAPI) -> None:
    """Install handlers that return all errors, including the framework's, in one format."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        if request.url.path.startswith("/v2/"):  # the Open Inference Protocol has its own format
            content = {"error": str(error)}
            return JSONResponse(content, status_code=error.status, headers=error.headers)
        return response_of(error)

    @api.exception_handler(HTTPException)
    async def no_such_route(_: Request, error: HTTPException) -> JSONResponse:
        code = {404: "no_such_path", 405: "wrong_method"}.get(error.status_code, "refused")
        return response_of(ApiError(error.status_code, code, str(error.detail), error.headers))

    @api.exception_handler(RequestValidationError)
    async def invalid_parameters(_: Request, error: RequestValidationError) -> JSONResponse:
        return response_of(ApiError(422, "invalid_parameter", first_of(error.errors())))

    @api.exception_handler(ClientDisconnect)
    async def client_disconnected(_: Request, error: Exception) -> JSONResponse:
        message = "the client disconnected before the response was sent"
        return response_of(ApiError(400, "client_left", message))

    @api.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> JSONResponse:
        _log.exception("a request failed", exc_info=error)
        message = "internal server error; see the server log"
        return response_of(ApiError(500, "internal", message))

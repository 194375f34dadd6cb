"""`/v1/models` and `/v1/admin/reload`: the models of the server, and how to load new versions."""

import asyncio

from fastapi import APIRouter, Request

from serving.api_error import ApiError
from serving.http.routing import Admin, ResourcesDep, facts
from serving.models.reloading import ReloadError
from serving.schemas import ErrorBody, ModelFound, ModelList, ReloadResult
from serving.tokens import bearer_token

router = APIRouter()


@router.get("/v1/models")
async def listed(resources: ResourcesDep) -> ModelList:
    """List the models on this server."""
    models = resources.shared.models
    return ModelList(
        models=[
            ModelFound(name=one.name, version=one.current.id, is_default=one is models.default)
            for one in models
        ]
    )


@router.post(
    "/v1/admin/reload",
    responses={status: {"model": ErrorBody} for status in (401, 403, 409, 503)},
)
@facts(needs_token=False, streams=True, is_idempotent=True)
async def reload(request: Request, resources: ResourcesDep) -> ReloadResult:
    """Load the published version of each model now.

    Requires a token from `--admin-token-file`. The response is sent when the new versions are
    served. If a bundle is damaged or fails its self-check, its previous version continues to serve,
    and the status is 409.
    """
    admin = _admin(request, resources.shared.admin)
    resources.release()
    try:
        return ReloadResult(models=await asyncio.to_thread(admin.reloader.reload))
    except ReloadError as error:
        raise ApiError(409, "reload_failed", str(error)) from error


def _admin(request: Request, admin: Admin | None) -> Admin:
    """Check the token of an administrator. Raises ApiError."""
    if admin is None:
        message = "this server has no administrators. Start it with --admin-token-file FILE"
        raise ApiError(403, "no_admin", message)
    admin.clients.client_of(bearer_token(request.headers.get("authorization", "")), ())
    return admin

"""The page at `/` and the documentation at `/docs`: static files.

`/` is a page for interactive queries; `/docs` is Swagger UI for `/openapi.json`. Both load files
only from this server, which takes them from `serving/page/` and, for Swagger UI, from the package
fastapi-offline. The files reveal nothing about the model, so they do not require a token, but the
requests that their scripts send do.
"""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

_PAGES = {"index.html": "/", "docs.html": "/docs"}

# Forbids content from other origins, inline code and framing. Images that a user drops on the page
# have blob: URLs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    # The browser requests each file on each load, so that files from two versions are never mixed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# The path of each file by its URL path.
FILES = {
    _PAGES.get(file.name, f"/page/{file.name}"): file
    for file in Path(str(files("serving"))).joinpath("page").iterdir()
} | {
    f"/docs/{name}": Path(str(files("fastapi_offline"))) / "static" / name
    for name in ("swagger-ui-bundle.js", "swagger-ui.css")
}
router = APIRouter(include_in_schema=False)


async def page(request: Request) -> Response:
    """Return one of the files. The path of a request is never looked up in the file system."""
    file = FILES[request.scope["path"]]
    # Python 3.11 guesses another type.
    media_type = "text/javascript" if file.suffix == ".js" else None
    return FileResponse(file, headers=_HEADERS, media_type=media_type)


for _path in FILES:
    router.add_api_route(_path, page, methods=["GET", "HEAD"])

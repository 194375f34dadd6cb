"""The page at `/` and the documentation at `/docs`: static files, read once at start-up.

`/` is a page for interactive queries; `/docs` is Swagger UI for `/openapi.json`. Both load files
only from this server, which takes them from `serving/page/` and, for Swagger UI, from the package
fastapi-offline. The files reveal nothing about the model, so they do not require a token, but the
requests that their scripts send do.
"""

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from operator import itemgetter

from fastapi import APIRouter, Request, Response

from serving.http.entry import without_token

# Media types by file extension.
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")

# Forbids content from other origins, inline code and framing. Images that a user drops on the page
# have blob: URLs.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_HEADERS = {
    # The browser revalidates each file on each load (status 304 if unchanged), so that files from
    # two versions are never mixed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _files() -> Iterator[tuple[str, bytes, str]]:
    """Yield the URL path, the content and the media type of each file."""
    found = [(f"/page/{file.name}", file) for file in files("serving").joinpath("page").iterdir()]
    swagger = files("fastapi_offline").joinpath("static")
    found += [(f"/docs/{name}", swagger.joinpath(name)) for name in _SWAGGER_FILES]
    for path, file in sorted(found, key=itemgetter(0)):
        if media_type := _MEDIA_TYPES.get(f".{file.name.rpartition('.')[2]}"):
            yield _PAGES.get(file.name, path), file.read_bytes(), media_type


_FILES = {path: (content, media_type) for path, content, media_type in _files()}
_TAGS = {path: f'"{sha256(content).hexdigest()[:32]}"' for path, (content, _) in _FILES.items()}
router = APIRouter(include_in_schema=False)


@without_token
async def page(request: Request) -> Response:
    """Return one of the files, or 304 if the browser's copy is current. The path of a request is
    never looked up in the file system."""
    path = request.scope["path"]
    (content, media_type), tag = _FILES[path], _TAGS[path]
    headers = {**_HEADERS, "ETag": tag}
    known = request.headers.get("If-None-Match", "").split(",")
    if tag in (one.strip().removeprefix("W/") for one in known):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


for _path in _FILES:
    router.add_api_route(_path, page, methods=["GET", "HEAD"])

"""The page at `/` and the documentation at `/docs`: static files, read once at start-up.

`/` is a page for interactive queries; `/docs` is Swagger UI for `/openapi.json`. Both load files
only from this server, which takes them from `serving/page/` and, for Swagger UI, from the package
fastapi-offline. The files reveal nothing about the model, so they do not require a token, but the
requests that their scripts send do.
"""

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import itemgetter

from fastapi import APIRouter, Request, Response

from serving.http.routing import without_token

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


def _paths() -> Iterator[tuple[str, Traversable]]:
    """Yield each file with its URL path."""
    for file in files("serving").joinpath("page").iterdir():
        if _media_type(file):
            yield _PAGES.get(file.name, f"/page/{file.name}"), file
    swagger = files("fastapi_offline").joinpath("static")
    for name in _SWAGGER_FILES:
        yield f"/docs/{name}", swagger.joinpath(name)


def _media_type(file: Traversable) -> str:
    """Return the media type of a file, or "" for a file that is not served."""
    return _MEDIA_TYPES.get(f".{file.name.rpartition('.')[2]}", "")


class _File:
    """A file in memory."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "ETag": self._tag}

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser's copy is current."""
        known = request.headers.get("If-None-Match", "")
        if self._tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._media_type, headers=self._headers)


_FILES = {
    path: _File(file.read_bytes(), _media_type(file))
    for path, file in sorted(_paths(), key=itemgetter(0))
}
router = APIRouter(include_in_schema=False)


@without_token
async def page(request: Request) -> Response:
    """Return one of the files. The path of a request is never looked up in the file system."""
    return _FILES[request.scope["path"]].answer(request)


for _path in _FILES:
    router.add_api_route(_path, page, methods=["GET", "HEAD"])

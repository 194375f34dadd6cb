"""The page at `/`: a person's way to ask. Static files of `serving/page/`, read once at the start.

They say nothing of the model, so they are open without a token; what they ask the API for is not.
"""

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from serving.errors import ApiError

# What each file is, by its ending.
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


def _files() -> Mapping[str, str]:
    """Path of a URL -> the name of the file that is served there."""
    found = sorted(
        one.name for one in files("serving").joinpath("page").iterdir() if _kind(one.name)
    )
    return {"/" if name == _INDEX else f"/page/{name}": name for name in found}


def _kind(name: str) -> str:
    """The media type of a file of the page; "" for what is none of its files."""
    return _KINDS.get(f".{name.rpartition('.')[2]}", "")


# Open without a token.
PAGE_PATHS = tuple(_files())

# Nothing from elsewhere, nothing inline, in nobody's frame; a picture that was dropped is a blob.
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
    # Asked for each time, answered by 304 unless it changed: files of two versions never mix.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> APIRouter:
    """The routes of the page's files; no path of a request reaches the file system."""
    routes = APIRouter(include_in_schema=False)
    folder = files("serving").joinpath("page")
    served = {
        path: PageFile(folder.joinpath(name).read_bytes(), _kind(name))
        for path, name in _files().items()
    }

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return served["/"].answer(request)

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def part(request: Request, name: str) -> Response:
        found = served.get(f"/page/{name}")
        if found is None:
            raise ApiError(404, "no_such_path", "the page has no such file")
        return found.answer(request)

    return routes


class PageFile:
    """A file in memory; `kind` is its media type."""

    def __init__(self, content: bytes, kind: str) -> None:
        self._content, self._kind = content, kind
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "ETag": self._tag}

    def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        known = request.headers.get("If-None-Match", "")
        if self._tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._kind, headers=self._headers)

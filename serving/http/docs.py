"""The page at `/docs`: Swagger UI over `/openapi.json`, with nothing from another server.

Swagger UI's own files come from the package fastapi-offline. The page is open without a token;
`serving/page/docs.js` sends the token of the browser's tab with all that it asks for.
"""

from importlib.resources import files

from fastapi import APIRouter, Request, Response

from serving.http.page import PageFile

_HTML = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>kway: documentation of the API</title>
  <link rel="icon" href="page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="docs/swagger-ui.css">
  <script src="docs/swagger-ui-bundle.js" defer></script>
  <script type="module" src="page/docs.js"></script>
</head>
<body>
<p id="waiting" role="status" hidden></p>
<p id="trouble" role="alert" hidden></p>
<div id="operations"></div>
<dialog id="token-dialog" aria-labelledby="token-title">
  <form id="token-form">
    <h2 id="token-title">This server asks for a token</h2>
    <p id="token-reason"></p>
    <label for="token-input">Token</label>
    <input id="token-input" type="password" autocomplete="off" spellcheck="false" required>
    <p>It is kept for this tab alone, until you close it.</p>
    <button type="submit">Go on</button>
  </form>
</dialog>
</body>
</html>
"""
_SWAGGER = {
    "/docs/swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "/docs/swagger-ui.css": "text/css; charset=utf-8",
}
# Open without a token.
DOCS_PATHS = ("/docs", *_SWAGGER)


def docs_routes() -> APIRouter:
    """The routes of the page and of Swagger UI's files, which are read once."""
    routes = APIRouter(include_in_schema=False)
    static = files("fastapi_offline").joinpath("static")
    served = {"/docs": PageFile(_HTML.encode(), "text/html; charset=utf-8")} | {
        path: PageFile(static.joinpath(path.rpartition("/")[2]).read_bytes(), kind)
        for path, kind in _SWAGGER.items()
    }

    async def page(request: Request) -> Response:
        return served[request.scope["path"]].answer(request)

    for path in served:
        routes.add_api_route(path, page, methods=["GET", "HEAD"])
    return routes

"""A route is declared in one place, and the server derives everything else from it."""

import re
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI

from serving.deploy.haproxy import _pattern
from serving.http import app
from serving.http.routing import ServiceDep, facts, paths_of
from tests.serving.in_process import application, ask, refusal
from tests.tiny_bundle import write

TOKEN = "t" * 32
router = APIRouter()


@router.get("/v1/open")
@facts(needs_token=False)
async def read_limit(service: ServiceDep) -> int:
    """Return a limit."""
    return service.config.max_inputs


@router.post("/v1/things/{thing}:find")
@facts(is_idempotent=True)
async def find(thing: str) -> str:
    """Find a thing by name."""
    return thing


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The server with an additional router."""
    added = app.Group("Things", "Routes of a new module.", (router,))
    monkeypatch.setattr(app, "GROUPS", (*app.GROUPS, added))
    monkeypatch.setattr(app, "ROUTERS", (*app.ROUTERS, router))
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(TOKEN)
    return application(write(tmp_path / "b"), token_file=tokens)


def test_a_route_is_served_documented_and_protected_as_declared(api: FastAPI) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert ask(api, "GET", "/v1/open").json() == 64
    assert refusal(ask(api, "POST", "/v1/things/a:find")) == (401, "no_token")
    assert ask(api, "POST", "/v1/things/a:find", headers=headers).json() == "a"
    document = ask(api, "GET", "/openapi.json", headers=headers).json()
    assert document["tags"][-1] == {"name": "Things", "description": "Routes of a new module."}
    assert "security" not in document["paths"]["/v1/open"]["get"]
    operation = document["paths"]["/v1/things/{thing}:find"]["post"]
    assert (operation["summary"], operation["tags"]) == ("Find a thing by name", ["Things"])
    assert operation["security"] == [{"token": []}]


def test_paths_are_selected_by_the_facts_declared_on_routes() -> None:
    (path,) = paths_of([router], lambda route: route.is_idempotent)
    assert re.fullmatch(_pattern(path), "/v1/things/a b:find")
    assert not re.fullmatch(_pattern(path), "/v1/things/a/b:find")


def test_paths_that_need_no_token_have_no_parameters() -> None:
    """The server compares these paths with request paths literally."""
    paths = paths_of(app.ROUTERS, lambda route: not route.needs_token)
    assert not [path for path in paths if "{" in path]

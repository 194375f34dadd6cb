"""How the page's files are served; no browser is needed."""

import re
from collections.abc import Iterator

import httpx
import pytest

from serving.http.routes import page
from serving.http.routing import paths_of

PATHS = [
    path
    for path in paths_of([page.router], lambda route: not route.needs_token)
    if not path.startswith("/docs")
]


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as opened:
        yield opened


def test_every_file_of_the_page_is_served_with_its_kind_and_a_strict_policy(
    client: httpx.Client,
) -> None:
    kinds = {
        "/": "text/html",
        ".css": "text/css",
        ".js": "text/javascript",
        ".svg": "image/svg+xml",
    }
    assert len(PATHS) > 10
    for path in PATHS:
        answer = client.get(path)
        kind = kinds[path if path == "/" else path[path.rindex(".") :]]
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        for known in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}'):
            again = client.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["content-security-policy"] == policy
        assert client.head(path).status_code == 200
    for path in (
        "/page/",
        "/page/..%2fapp.py",
        "/page/%2e%2e/page.py",
        "/page/x",
    ):
        assert client.get(path).status_code == 404


def test_the_files_name_nothing_from_elsewhere_and_are_no_part_of_the_api(
    client: httpx.Client,
) -> None:
    for path in PATHS:
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|@import|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text
        )
    assert not set(PATHS) & set(client.get("/openapi.json").json()["paths"])

"""The files of the page and their headers, without a browser."""

import re
from collections.abc import Iterator

import httpx
import pytest

from serving.http.routes import page

PATHS = sorted(page.FILES)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as opened:
        yield opened


def test_every_file_has_its_media_type_and_a_strict_policy(
    client: httpx.Client,
) -> None:
    media_types = {
        "/": "text/html",
        ".css": "text/css",
        ".js": "text/javascript",
        ".svg": "image/svg+xml",
    }
    assert len(PATHS) > 10
    for path in PATHS:
        response = client.get(path)
        media_type = media_types["/" if "." not in path else path[path.rindex(".") :]]
        assert response.headers["content-type"].startswith(media_type)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        assert client.head(path).status_code == 200
    for path in (
        "/page/",
        "/page/..%2fapp.py",
        "/page/%2e%2e/page.py",
        "/page/x",
    ):
        assert client.get(path).status_code == 404


def test_the_files_contain_no_external_urls_and_are_not_in_the_openapi_document(
    client: httpx.Client,
) -> None:
    for path in PATHS:
        if path.startswith("/docs/"):
            continue  # Swagger UI
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|@import|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text
        )
    assert not set(PATHS) & set(client.get("/openapi.json").json()["paths"])

"""The page at `/docs` in Chromium, served by the real application in this process."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.serving.browsing import visit
from tests.serving.in_process import application, listening
from tests.tiny_bundle import write

TOKEN = "a-token-of-this-test-0123456789"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("docs")
    tokens: Path = folder / "tokens"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    with listening(application(write(folder / "pets"), token_file=tokens)) as address:
        yield address


def test_every_operation_is_listed_and_can_be_tried_with_the_token(
    browser: Browser, url: str
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    operations = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    with visit(browser, f"{url}/", is_started=False) as page:
        page.goto(f"{url}/docs")
        page.locator("#token-input").fill(TOKEN)
        page.get_by_role("button", name="Continue").click()
        page.locator(".opblock").first.wait_for()
        shown = {
            (
                block.locator(".opblock-summary-method").inner_text(),
                str(block.locator(".opblock-summary-path").get_attribute("data-path")),
            )
            for block in page.locator(".opblock").all()
        }
        assert shown == operations
        model = page.locator(".opblock", has=page.locator('[data-path="/v1/model"]'))
        model.locator(".opblock-summary-control").click()
        model.get_by_role("button", name="Try it out").click()
        model.get_by_role("button", name="Execute").click()
        expect(model.locator(".live-responses-table")).to_contain_text('"num_classes"')
